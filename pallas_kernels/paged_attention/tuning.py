import dataclasses
@dataclasses.dataclass(frozen=True)
class TuningConfig:
    block: int = 64
    stages: int = 2
    warpgroups: int = 1
    splits: int = 1
    registers: int | None = None
