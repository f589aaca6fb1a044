"""Multi-token-prediction modules: a fused input, one decoder layer of the verifier's class, an output norm.

Module k computes, at row i, h = eh_proj(cat[enorm(embed(token i + 1 + k)), hnorm(h')]). For k = 0, h' is the verifier's
hidden state after its final norm; for k > 0 it is module k - 1's output at row i. The decoder layer and
shared_head.norm follow; the norm's output is the input of the output matrix and of the next module. A row's position is
that of its token. Source: DeepSeek-V3, arXiv:2412.19437, section 2.2; order and norms are those of the published
weights, as run by transformers and SGLang.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.round.rows import ROWS_KEYWORD, Rows
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.linears import lay_out_linears
from wingbeat.runtime.verifier.layers.probe import PROBE_KEYWORD, PROBE_NAME, Recorder
from wingbeat.runtime.verifier_errors import UnsupportedModelError


class MtpModule(nn.Module):
    """An MTP module; its attention uses layer `index` of the batch's caches.

    Args:
        model: model of the verifier's class, for its layer and norm classes; its weights are not read and may be on the
            meta device.
        index: index of the module.
    """

    embedding: Tensor
    head: Tensor

    def __init__(self, model: PreTrainedModel, index: int) -> None:
        super().__init__()
        like = model.get_decoder().layers[-1]
        config = model.config.get_text_config()
        norm = type(like.input_layernorm)
        self.enorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        # A layer's kind depends on its index. A module must have the kind of the verifier's last layer, so it is built
        # with that layer's index.
        self.block = type(like)(config, config.num_hidden_layers - 1)
        for part in self.block.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor], **attention: object
    ) -> Tensor:
        """Returns the normalised output [num_tokens, hidden_size].

        Args:
            tokens: int64 [num_tokens], or embeddings [num_tokens, hidden_size].
            hidden: [num_tokens, hidden_size]: the input h' of each row.
            positions: int64 [num_tokens], for layers that read them.
            rotary: cosines and sines of the positions, [1, num_tokens, rotary_dim].
            attention: keywords for the attention function.
        """
        embedded = tokens if tokens.is_floating_point() else F.embedding(tokens, self.embedding)
        inputs = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        out = self.block(
            self.eh_proj(inputs)[None],
            position_ids=positions[None],
            position_embeddings=rotary,
            use_cache=False,
            **({"attention_mask": None} | attention),
        )
        return self.norm(out[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps the output [..., hidden_size] of `forward` to logits [..., vocab_size]."""
        return F.linear(hidden, self.head)


class MtpModules(nn.Module):
    """All modules of a checkpoint, with the rotary embedding that they share.

    Args:
        model: see `MtpModule`; the modules share the model's config object, so that both use the same attention
            function.
        num_modules: number of modules.
    """

    def __init__(self, model: PreTrainedModel, num_modules: int) -> None:
        super().__init__()
        self.config = model.config.get_text_config()
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        if rotary is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no rotary embedding: its MTP modules are not supported"
            )
        self.items = nn.ModuleList([MtpModule(model, index) for index in range(num_modules)])
        with torch.device("cpu"):
            self.rotary = type(rotary)(self.config)
        self.layers: list[LayerAttention] = []

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.items[0].eh_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and KV."""
        return self.items[0].eh_proj.weight.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [num_tokens, hidden_size] of token ids int64 [num_tokens], from the embedding that all modules
        share.
        """
        return F.embedding(token_ids, self.items[0].embedding)

    def run(self, index: int, rows: Rows, hidden: Tensor) -> Tensor:
        """Run one module over the rows of a flattened batch; see `MtpModule.forward`.

        Args:
            index: index of the module.
            rows: the batch; tokens may be embeddings [1, num_tokens, hidden_size], and positions [3, 1, num_tokens] by
                axis.
            hidden: [num_tokens, hidden_size], the input h' of each row.
        """
        rotary = self.rotary(hidden[None], rows.positions)
        positions = rows.positions.flatten(0, -2)[0]
        return self.items[index](rows.token_ids[0], hidden, positions, rotary, **{ROWS_KEYWORD: rows})

    @torch.inference_mode()
    def prepare(self) -> "MtpModules":
        """Compare each module's paged attention with transformers' eager attention, then switch to paged attention.

        Raises:
            UnsupportedModelError: a layer never calls the attention function, or the outputs differ.
        """
        self.eval().requires_grad_(False)
        lay_out_linears(self)
        recorder = Recorder()
        for index, module in enumerate(self.items):
            probed, expected = (self._probe(module, name, recorder) for name in (PROBE_NAME, "eager"))
            error = (probed - expected).abs().max().item()
            tolerance = (1e-3 if self.dtype == torch.float32 else 5e-2) * max(expected.abs().max().item(), 1.0)
            if index not in recorder.layers or not error <= tolerance:
                raise UnsupportedModelError(
                    f"MTP module {index} ({type(module.block).__name__}) has an unsupported attention: its output "
                    f"differs by {error:.2e} from transformers' eager attention"
                )
        self.layers = [recorder.layers[index] for index in range(len(self.items))]
        self.config._attn_implementation = ATTENTION_NAME
        return self

    def _probe(self, module: MtpModule, attention: str, recorder: Recorder) -> Tensor:
        """Runs three tokens through a module with the named attention function."""
        self.config._attn_implementation = attention
        token_ids, positions = torch.tensor([[1, 2, 3], [0, 1, 2]], device=self.device).unbind()
        hidden = self._sample_hidden()
        rotary = self.rotary(hidden[None], positions[None])
        mask = torch.full((1, 1, 3, 3), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device).triu(1)
        return module(token_ids, hidden, positions, rotary, attention_mask=mask, **{PROBE_KEYWORD: recorder})

    def _sample_hidden(self) -> Tensor:
        """Three different hidden states, deterministic without a random generator."""
        size = 3 * self.config.hidden_size
        return torch.arange(size, device=self.device, dtype=torch.float32).sin().view(3, -1).to(self.dtype)
