"""What an operator can set about the ranks of a verifier."""

from pydantic import Field

from wingbeat.deployments.options.model_options import ModelOptions, checkpoint_here
from wingbeat.deployments.options.node_resources import NodeResources
from wingbeat.runtime.refusals import Feature
from wingbeat.runtime.tensor_files import read_fields, text_fields
from wingbeat.runtime.tensor_parallel.divisible import check_sizes


class RankOptions(ModelOptions):
    """The part of `AppConfig` that says how many processes a verifier is divided among, and on which nodes they run."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks that each verifier's weights and KV heads are divided among: processes of one node, each "
        "with num_gpus_per_verifier and num_cpus_per_verifier.",
    )

    verifier_resources: NodeResources = Field(
        None,
        description="Ray resources of the nodes that verifiers may run on, beside CPUs and GPUs, such as big_gpu; each "
        "rank takes the amounts.",
    )

    def tries_bfloat16(self) -> bool:
        """As of a single process; ranks all have the same dtype."""
        return self.tensor_parallel_size == 1 and super().tries_bfloat16()

    def asked(self) -> dict[str, tuple[bool, str]]:
        size = self.tensor_parallel_size
        return super().asked() | {Feature.RANKS: (size > 1, f"tensor_parallel_size is {size}")}

    def check_ranks(self, num_gpus: float) -> None:
        """Refuse several GPUs of one process, and sizes of the model that are not divided evenly.

        Args:
            num_gpus: of each rank.

        Raises:
            ValueError: one line that names the setting to change.
        """
        size = self.tensor_parallel_size
        if num_gpus > 1:
            raise ValueError(
                f"num_gpus_per_verifier is {num_gpus:g}: one process runs on one GPU; use 1 and "
                f"tensor_parallel_size {int(num_gpus)}"
            )
        if size == 1:
            return
        folder = checkpoint_here(self.model)
        if folder is not None:
            fields = read_fields(folder / "config.json")
            names = fields.get("architectures")
            name = names[0] if isinstance(names, list) and names else folder.resolve().name
            check_sizes(text_fields(fields), str(name), size)
