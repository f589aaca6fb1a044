"""The kinds of heads that can be trained, by the names a user gives."""

from wingbeat.runtime.heads.families import OnePassFamily
from wingbeat.runtime.training.family import Family
from wingbeat.runtime.training.one_pass_families import (
    DFlash2Family,
    DFlashFamily,
    DSparkFamily,
    ParallelEagleFamily,
)
from wingbeat.runtime.training.unrolled_families import Eagle1Family, Eagle3Family, MtpFamily

FAMILIES: dict[str, Family] = {
    "eagle3": Eagle3Family(),
    "eagle3.1": Eagle3Family(newer=True),
    "eagle1": Eagle1Family(),
    "mtp": MtpFamily(),
    "dflash": DFlashFamily(),
    "jetspec": DFlashFamily(OnePassFamily.JETSPEC),
    "dspark": DSparkFamily(),
    "dflash2": DFlash2Family(),
    "p-eagle": ParallelEagleFamily(),
}
"""What `TrainDrafterConfig.family` names."""
