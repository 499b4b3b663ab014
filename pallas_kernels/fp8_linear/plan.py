"""How the kernel cuts its work, which follows from shapes alone: no row's bits depend on what any row holds."""

from dataclasses import dataclass

from pallas_kernels.block_scaled import BLOCKS
from pallas_kernels.hopper import MULTIPROCESSORS, WARPGROUP

THREAD_BLOCKS = MULTIPROCESSORS
WARPGROUPS = 4
FEATURES = 64  # of a unit: wgmma's M
CHUNK = BLOCKS["e4m3"][1]  # columns that have one scale
SLOT_BYTES = FEATURES * CHUNK + 4 * WARPGROUP  # SMEM for a chunk of weights, and a word for each thread with its scale
PITCH = FEATURES + 4  # floats between rows of sums in SMEM, so that the threads of a warp write to different banks

_LARGEST_TILE = 32
_SHARED_BYTES = 225_000  # Hopper has 232,448, of which Mosaic takes a little


@dataclass(frozen=True)
class Plan:
    """The work on `groups` matrices [features, columns] of the same shape, each with rows of its own.

    It is cut into units: 64 features of one matrix times one slice of the columns, for one tile of rows. A unit's
    columns are dealt to the warpgroups of a block in chunks.

    Attributes:
        rows: of each matrix's x.
        groups, features, columns: see above.
        tile: rows of a unit, wgmma's N: 8, 16 or 32.
        slices: of the columns.
    """

    rows: int
    groups: int
    features: int
    columns: int
    tile: int
    slices: int

    @property
    def chunks(self) -> int:
        """Chunks that a warpgroup has of a unit."""
        return self.columns // self.slices // CHUNK // WARPGROUPS

    @property
    def ahead(self) -> int:
        """Chunks on their way to a warpgroup; large tiles need the room in SMEM for themselves."""
        return {8: 4, 16: 3, 32: 2}[self.tile]

    @property
    def units_of_panel(self) -> int:
        """Units that read the same panel: x of one tile of rows, one matrix and one slice."""
        return self.features // FEATURES

    @property
    def units(self) -> int:
        """All of them."""
        return -(-self.rows // self.tile) * self.groups * self.slices * self.units_of_panel

    @property
    def balance(self) -> float:
        """The part of the time of the busiest thread block for which all blocks are busy on average."""
        return self.units / THREAD_BLOCKS / -(-self.units // THREAD_BLOCKS)

    @property
    def panel_size(self) -> int:
        """Numbers of a panel that a warpgroup keeps in SMEM, float16."""
        return self.chunks * CHUNK * self.tile

    @property
    def sums_size(self) -> int:
        """Partial sums of a unit that a thread block exchanges through SMEM, float32, padding included."""
        return WARPGROUPS * self.tile * PITCH

    @property
    def shared_bytes(self) -> int:
        """SMEM of a thread block: chunks on their way, a panel, its powers of two, and two buffers of sums."""
        of_warpgroup = self.ahead * SLOT_BYTES + 2 * self.panel_size + 4 * self.chunks * self.tile
        return WARPGROUPS * of_warpgroup + 2 * 4 * self.sums_size


def plan_of(rows: int, groups: int, features: int, columns: int) -> Plan:
    """The plan that keeps the thread blocks busiest, and of those the one with the fewest slices.

    Args:
        features: a multiple of 128.
        columns: a multiple of 512.
    """
    tile = min(8 << max(0, (rows - 1).bit_length() - 3), _LARGEST_TILE)
    chunks = columns // CHUNK // WARPGROUPS
    plans = (Plan(rows, groups, features, columns, tile, n) for n in range(1, chunks + 1) if chunks % n == 0)
    fitting = (plan for plan in plans if plan.shared_bytes <= _SHARED_BYTES)
    return max(fitting, key=lambda plan: (round(plan.balance, 2), -plan.slices))
