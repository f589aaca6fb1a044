"""An MTP module in training: one decoder layer of the verifier's class, used at every depth.

Computes the same as `wingbeat.runtime.mtp.mtp_modules.MtpModule`, but over whole chains, as
`wingbeat.runtime.heads.unroll` requires. The module's file has DeepSeek's layout and is written to the same folder as
the verifier's files.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionInterface

from wingbeat.runtime.heads.contract import Attend, DraftHead, HeadConvention, Rotary
from wingbeat.runtime.hugging_face import build_model
from wingbeat.runtime.mtp.mtp_modules import MtpModule
from wingbeat.runtime.recordings.format import write_atomically
from wingbeat.runtime.training.verifier_weights import VerifierWeights

MODULE_FILE = "mtp.safetensors"
_CHAINS = "wingbeat_training_chains"
_NAMES = {"norm.weight": "shared_head.norm.weight"}


class MtpHead(DraftHead):
    """An MTP module as a draft head over the whole vocabulary; features are the verifier's last hidden states.

    At the start of training, the layer is a copy of the verifier's last layer, and the output of the input projection
    is the normalised hidden state alone.

    Raises:
        ValueError: the verifier's last layer lacks tensors of its class, for example if experts are stored one by one.
    """

    def __init__(self, weights: VerifierWeights, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # The config selects the attention function, so the module gets a copy of the config, and the verifier's config
        # is not changed.
        config = copy.deepcopy(weights.config)
        with torch.device("meta"):
            model = build_model(config)
            module = MtpModule(model, 0)
        config = model.config.get_text_config()
        config._attn_implementation = _CHAINS
        self.hidden_size: int = config.hidden_size
        self.taps_size = config.hidden_size
        self.num_key_value_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_position_embeddings = config.max_position_embeddings
        self._convention = HeadConvention((config.num_hidden_layers,))
        self.module = module.to_empty(device="cpu").float()
        self._rotary = type(model.get_decoder().rotary_emb)(config)
        self.embed_tokens = nn.Embedding.from_pretrained(weights.embedding.detach().cpu().float().clone())
        self.lm_head = nn.Linear(*reversed(weights.lm_head.shape), bias=False)
        self.register_buffer("draft_token_ids", torch.arange(weights.vocab_size))
        with torch.no_grad():
            self.lm_head.weight.copy_(weights.lm_head)
            self._start(weights)
        self.lm_head.weight.requires_grad_(False)
        # `MtpModule` reads embedding and output matrix from its own attributes, so the shared parameters are assigned
        # to them.
        self.module.embedding, self.module.head = self.embed_tokens.weight, self.lm_head.weight
        self.train()

    @property
    def convention(self) -> HeadConvention:
        return self._convention

    def _set_convention(self, convention: HeadConvention) -> None:
        if convention != self._convention:
            raise ValueError(f"{convention}: an MTP module can only be read as {self._convention}")

    @property
    def dtype(self) -> torch.dtype:
        return self.module.eh_proj.weight.dtype

    def fuse(self, taps: Tensor) -> Tensor:
        """Returns the verifier's last hidden states unchanged: they are the features."""
        return taps

    def rotary(self, position_ids: Tensor) -> Rotary:
        """Rotary factors [1, batch * N, rotary_dim] of the tokens, each at the position after its feature's;
        `position_ids`, int64 [batch, N], are the positions of the features.
        """
        return self._rotary(self.embed_tokens.weight, position_ids.flatten()[None] + 1)

    def forward(
        self, token_ids: Tensor, features: Tensor, rotary: Rotary, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Maps tokens int64 [batch, N] and features [batch, N, H] to normalised states [batch, N, H].

        Raises:
            ValueError: `rows` is given; training needs every row.
        """
        if rows is not None:
            raise ValueError("rows must be None: a head in training computes every row")
        batch, length = token_ids.shape
        positions = torch.arange(1, length + 1, device=token_ids.device).repeat(batch)
        flat = self.module(
            token_ids.flatten(), features.flatten(0, 1), positions, rotary, chains=_Chains(attend, batch)
        )
        return flat.unflatten(0, (batch, length))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, computed with the verifier's output matrix."""
        return self.lm_head(hidden)

    def feedback(self, hidden: Tensor) -> Tensor:
        """Returns the module's states unchanged: they are its next features."""
        return hidden

    def _start(self, weights: VerifierWeights) -> None:
        expected = self.module.block.state_dict()
        layer = {name: tensor for name, tensor in weights.last_layer.items() if name in expected}
        missing = sorted(expected.keys() - layer.keys())
        if missing:
            raise ValueError(f"the verifier's last layer has no {missing[0]}: an MTP module cannot be trained for it")
        self.module.block.load_state_dict({name: tensor.float() for name, tensor in layer.items()})
        for norm in (self.module.enorm, self.module.hnorm, self.module.norm):
            norm.weight.fill_(1.0)
        self.module.norm.weight.copy_(weights.last_layer.get("final_norm.weight", self.module.norm.weight))
        self.module.eh_proj.weight.zero_()[:, self.hidden_size :].fill_diagonal_(1.0)


class _Chains:
    """Adapts the layer's attention to chains: flattened rows are split into `batch` sequences."""

    def __init__(self, attend: Attend, batch: int) -> None:
        self.attend, self.batch = attend, batch

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[1, heads, batch * N, D] each -> [1, batch * N, heads, D]."""
        shaped = (part[0].unflatten(1, (self.batch, -1)).permute(1, 2, 0, 3) for part in (query, key, value))
        return self.attend(*shaped).flatten(0, 1)[None]


def _chain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    chains: _Chains,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"the verifier's last layer attends with {name}: an MTP module cannot be trained for it")
    default = query.shape[-1] ** -0.5
    if scaling is not None and scaling != default:
        query = query * (scaling / default)
    return chains(query, key, value), None


AttentionInterface.register(_CHAINS, _chain_attention)


def save_mtp_module(head: MtpHead, verifier: Path, path: Path) -> None:
    """Write a folder with the verifier's files, linked or copied, and the file of the module.

    `config.json` sets the number of modules to 1 (`num_nextn_predict_layers`), as in DeepSeek-V3.
    """
    path.mkdir(parents=True, exist_ok=True)
    for file in verifier.iterdir():
        if file.is_file() and file.name not in ("config.json", "metrics.json", MODULE_FILE):
            _link(file, path / file.name)
    config = json.loads((verifier / "config.json").read_text())
    text = json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2) + "\n"
    write_atomically(path / "config.json", lambda temporary: temporary.write_text(text))
    prefix = f"model.layers.{head.tap_layers[0]}."
    tensors = {
        prefix + _NAMES.get(name, name.removeprefix("block.")): tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in head.module.state_dict().items()
        if name not in ("embedding", "head")
    }
    write_atomically(path / MODULE_FILE, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))


def _link(source: Path, link: Path) -> None:
    if link.exists() and link.samefile(source):
        return
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(source.resolve())
    except OSError:  # the target is on another file system, or the file system has no hard links
        shutil.copyfile(source, link)
