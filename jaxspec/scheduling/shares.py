"""How the rows that read share the prompt tokens of a plan."""


def fair_shares(
    wanted: list[int], budget: int, least: int = 1, *, serves_first: bool = True
) -> list[int]:
    """A budget shared so that the smallest share is as large as possible, then the next, ...

    Those who want little get it all; the others get equal shares of the rest. Nobody gets fewer
    than ``least`` but who wants no more, or gets what is left, or nothing. With ``serves_first``
    the first gets some, too.
    """
    shares, kept = [0] * len(wanted), min([*wanted[:1], least]) if serves_first else 0
    for place, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        kept = 0 if index == 0 else kept
        share = max(least, budget // (len(wanted) - place))
        shares[index] = min(wanted[index], share, budget - kept)
        budget -= shares[index]
    return shares
