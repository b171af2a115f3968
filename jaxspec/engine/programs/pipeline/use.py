"""How busy the stages of a pipeline were."""

import dataclasses


@dataclasses.dataclass
class PipelineUse:
    """How the stages were used by rounds so far.

    Attributes:
      steps: that a stage could have taken since the first of each call.
      busy: that it took.
    """

    stages: int
    steps: int = 0
    busy: int = 0

    def add(self, groups: int, rounds: int) -> None:
        """A call of so many groups of rows. A group's next round waits for its last one to leave
        all stages."""
        self.busy += rounds * groups
        self.steps += (rounds - 1) * max(groups, self.stages) + groups + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of the steps in which a stage has no work."""
        return 1 - self.busy / self.steps if self.steps else 0.0
