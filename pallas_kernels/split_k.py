"""How many split-K partial sums a narrow product is computed in, measured on an H100."""

from pallas_kernels.h100 import MULTIPROCESSORS, largest_fitting

MAX_ROWS = 256  # most rows of a product that is split
MIN_DEPTH = 128  # least depth (length of K) of one split
UNSPLIT_DEPTH = 3072  # XLA does not split a product of this depth again; it does at depth 3584
SPLIT_AGAIN_ROWS = range(6, 65)  # numbers of rows with which XLA splits deeper products again


def choose_split_k(rows: int, depth: int, width: int) -> int:
    """Number of split-K partial sums for a product [rows, depth] x [depth, width].

    Only for products whose partial sums are added up by the kernel that reads them. XLA splits
    products whose tiles do not fill all multiprocessors, and adds up the partial sums in an extra
    launch.

    Measured on an H100, in us, with 2, 4, 8 and 16 splits: [48, 14336] x [14336, 4096] took 54.3,
    51.5, 52.4 and 56.1; [48, 4096] x [4096, 4096] took 18.8, 18.1, 18.8 and 20.4. With 2 and 6 rows
    the times were within 4 %. More splits cost the consumer more time.

    Exception: with 6 to 64 rows XLA splits each of the four products of depth 14336 / 4 again, in
    one more launch. 8 splits avoid this. Rounds of a model with 16 layers were then faster by 17 us
    with 6 rows, 12 with 8, 16 with 32, 21 with 48 and 33 with 60. (With 128 rows, where XLA does
    not split again, 8 splits were 213 us slower over 32 layers, in another run.)

    So it is with two splits of depth 7168 / 2, as Llama-70B has them on 4 devices: 4 splits save a
    launch a layer. That was seen in compiled programs, not timed.
    """
    if rows > MAX_ROWS:
        return 1
    tiles = -(-rows // 128) * -(-width // 128)
    max_tiles = 3 * MULTIPROCESSORS // 2
    splits = largest_fitting(lambda n: depth % (n * MIN_DEPTH) == 0 and n * tiles <= max_tiles)
    doubled, split_again = 2 * splits, rows in SPLIT_AGAIN_ROWS and depth > splits * UNSPLIT_DEPTH
    helps = splits == 4 or (splits == 2 and depth <= doubled * UNSPLIT_DEPTH)
    return doubled if split_again and helps and depth % (doubled * MIN_DEPTH) == 0 else splits
