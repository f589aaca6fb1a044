"""What an operator can set about the ranks of a verifier."""

from pydantic import Field

from wingbeat.deployments.options.model_options import ModelOptions, checkpoint_here
from wingbeat.runtime.tensor_files import read_json, text_fields
from wingbeat.runtime.tensor_parallel.divisible import check_sizes


class RankOptions(ModelOptions):
    """The part of `AppConfig` that says how many processes a verifier is divided among."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks that each verifier's weights and KV heads are divided among: processes of one node, each "
        "with num_gpus_per_verifier and num_cpus_per_verifier.",
    )

    def tries_bfloat16(self) -> bool:
        """As of a single process; ranks all have the same dtype."""
        return self.tensor_parallel_size == 1 and super().tries_bfloat16()

    def check_ranks(self, num_gpus: float, cuda_graphs: bool, serves_adapters: bool, may_span_nodes: bool) -> None:
        """Refuse what ranks do not have, and several GPUs of one process.

        Args:
            num_gpus: of each rank.
            may_span_nodes: whether the drafter may be on another node.

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
        ranks = f"tensor_parallel_size is {size}"
        if 0 < num_gpus < 1:
            raise ValueError(f"num_gpus_per_verifier is {num_gpus:g}: {ranks}, and each rank needs a whole GPU; use 1")
        if self.backend == "tensorrt":
            raise ValueError(f"backend is tensorrt: {ranks}, and its engines are not divided; use torch")
        if serves_adapters:
            raise ValueError(f"{ranks}: ranks serve no LoRA adapters; leave out lora_modules and lora_update_dir")
        if self.kv_cache_dtype != "auto":
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype}: {ranks}, which round no KV; use auto")
        if self.deterministic:
            raise ValueError(f"deterministic is True: {ranks}, and sums over ranks have no fixed order")
        for name, value in (("compile", self.compile), ("cuda_graphs", cuda_graphs)):
            if value:
                raise ValueError(f"{name} is True: {ranks}, whose rounds run eagerly; leave {name} out")
        if self.threads == 0:
            raise ValueError(f"threads is 0: {ranks}, which would try them all at once; give a number")
        if may_span_nodes:
            raise ValueError(
                f"{ranks}: they and their drafter are on one node; leave out drafter_resources, and channel 'remote'"
            )
        folder = checkpoint_here(self.model)
        if folder is not None:
            fields = read_json(folder / "config.json")
            names = fields.get("architectures")
            name = names[0] if isinstance(names, list) and names else folder.resolve().name
            check_sizes(text_fields(fields), str(name), size)
