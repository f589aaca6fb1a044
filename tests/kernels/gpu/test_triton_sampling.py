"""Sampling kernels against their reference: same kept tokens, same choices, whatever the launch shape."""

import pytest
import torch

from tests.kernels.sampling_inputs import (
    PARAMETERS,
    Rows,
    mixed_rows,
    random_logits,
    random_processors,
    sorted_reference,
    to_device,
)

pytest.importorskip("triton")

from wingbeat.kernels.gpu.sampling import launch as triton_sampling
from wingbeat.kernels.gpu.sampling import scratch as triton_sampling_workspace
from wingbeat.kernels.sampling import reference as sampling
from wingbeat.kernels.sampling.processors import LogitProcessors, apply_processors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")]


pytestmark = [pytest.mark.few(3), pytest.mark.usefixtures("poisoned_memory")]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles and several programs per row at vocabularies the interpreter can take."""
    monkeypatch.setattr(triton_sampling_workspace, "_TILE", 64)
    monkeypatch.setattr(triton_sampling_workspace, "_SEARCH_TILE", 32)
    monkeypatch.setattr(triton_sampling_workspace, "_MAX_SPLITS", 2)
    monkeypatch.setattr(triton_sampling_workspace, "_LISTED", 128)


def choose(logits, rows, seeds, positions, *, any_filtered, processors=None, workspace=None) -> torch.Tensor:
    """The kernels' tokens, on the host."""
    return triton_sampling.choose_tokens(
        logits.to(DEVICE),
        *rows.to(DEVICE),
        seeds.to(DEVICE),
        positions.to(DEVICE),
        any_filtered=any_filtered,
        processors=to_device(processors, DEVICE),
        workspace=workspace,
    ).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("listed", [128, 4])
@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [("gaussian", 101), ("tied", 101), ("masked", 7), ("equal", 33)],
    ids=str,
)
@pytest.mark.usefixtures("small_tiles")
def test_filters_keep_what_the_whole_sort_keeps(kind, vocab_size, listed, monkeypatch):
    """Where the tokens of the last span have room in their list, and where a whole row is searched."""
    monkeypatch.setattr(triton_sampling_workspace, "_LISTED", listed)
    num_rows = {"gaussian": 8}.get(kind, 2)
    rows, logits = mixed_rows(num_rows), random_logits(num_rows, vocab_size, kind)
    before = logits.clone()
    processed = triton_sampling.process_logits(
        logits.to(DEVICE), *rows.to(DEVICE), any_filtered=True, processors=None
    ).cpu()
    assert torch.equal(logits, before)
    expected = sorted_reference(logits, rows)
    for row in range(num_rows):
        assert torch.equal(processed[row], expected[row]), f"row {row}: {PARAMETERS[row]}"


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_choices_are_the_references_in_any_split_of_a_row(monkeypatch):
    rows = Rows(*(column[[0, 2, 4, 6, 7]] for column in mixed_rows(8)))
    logits = random_logits(5, 101, "gaussian").to(torch.bfloat16)
    seeds, positions = torch.arange(5) * 7919, torch.arange(5) + 11
    expected = sampling.choose_tokens(logits, *rows, seeds, positions, any_sampled=True, any_filtered=True)
    assert torch.equal(choose(logits, rows, seeds, positions, any_filtered=True), expected)
    monkeypatch.setattr(triton_sampling_workspace, "_NUM_PROGRAMS", 1)
    assert torch.equal(choose(logits, rows, seeds, positions, any_filtered=True), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_the_last_span_has_few_tokens_and_a_whole_row_is_read_only_where_equals_fill_the_list(monkeypatch):
    """A row of top-p, a row of top-k, a row of both and a row that a grammar leaves fewer tokens than top-k; and two
    rows of equal tokens."""
    monkeypatch.setattr(triton_sampling_workspace, "_LISTED", 32)
    logits = random_logits(6, 1500, "gaussian")
    logits[3, 5:] = float("-inf")
    logits[4:] = 0.0
    top_ks, top_ps = torch.tensor([0, 20, 40, 50, 0, 3]), torch.tensor([0.9, 1.0, 0.8, 0.7, 0.6, 1.0])
    rows, keys = Rows(torch.ones(6), top_ks, top_ps, torch.zeros(6)), torch.arange(6)
    workspace = triton_sampling_workspace.SamplingWorkspace(6, 1500, DEVICE)
    expected = sampling.choose_tokens(logits, *rows, keys, keys, any_sampled=True, any_filtered=True)
    assert torch.equal(choose(logits, rows, keys, keys, any_filtered=True, workspace=workspace), expected)
    assert (workspace.num_listed <= 32).tolist() == [True] * 4 + [False] * 2
    assert workspace.edges[4, 1] == 598, "of equal tokens the lowest ids are removed: 599 of 1500 are less than 0.4"
    monkeypatch.setattr(triton_sampling_workspace, "_LISTED", 512)
    listed = triton_sampling.process_logits(
        logits.to(DEVICE), *rows.to(DEVICE), any_filtered=True, processors=None, listed_only=True
    ).cpu()
    assert torch.equal(listed[:4], sorted_reference(logits, rows)[:4])
    assert torch.equal(listed[4:], logits[4:]), "without a search of whole rows nothing is removed"


@pytest.mark.slow
def test_a_nucleus_of_half_the_vocabulary_is_found_in_a_short_list(monkeypatch):
    """A row of top-p, a row of top-p and top-k, and a row of top-k, whose logits in bfloat16 have ties."""
    monkeypatch.setattr(triton_sampling_workspace, "_LISTED", 512)
    rows = Rows(
        torch.tensor([1.5, 1.0, 1.0]), torch.tensor([0, 2000, 900]), torch.tensor([0.95, 0.99, 1.0]), torch.zeros(3)
    )
    logits, keys = random_logits(3, 16384, "gaussian").to(torch.bfloat16), torch.arange(3)
    workspace = triton_sampling_workspace.SamplingWorkspace(3, 16384, DEVICE)
    choose(logits, rows, keys, keys, any_filtered=True, workspace=workspace)
    assert (workspace.num_listed <= 512).all()
    kept = triton_sampling.process_logits(logits.to(DEVICE), *rows.to(DEVICE), any_filtered=True, processors=None).cpu()
    assert torch.equal(kept, sorted_reference(logits, rows))
    assert (kept > float("-inf")).sum(1).min() > 512


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "vocab_size"), [("gaussian", 101), ("tied", 101), ("masked", 7), ("equal", 33)], ids=str
)
@pytest.mark.usefixtures("small_tiles")
def test_one_pass_finds_edges_of_a_short_vocabulary(kind, vocab_size):
    num_rows = {"gaussian": 8}.get(kind, 2)
    rows, logits = mixed_rows(num_rows), random_logits(num_rows, vocab_size, kind)
    processed = triton_sampling.process_logits(
        logits.to(DEVICE), *rows.to(DEVICE), any_filtered=True, processors=None, listed_only=True
    ).cpu()
    expected = sorted_reference(logits, rows)
    for row in range(num_rows):
        assert torch.equal(processed[row], expected[row]), f"row {row}: {PARAMETERS[row]}"


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_unfiltered_choices_are_the_references():
    num_rows = 30
    rows = Rows(torch.rand(num_rows), torch.zeros(num_rows).long(), torch.ones(num_rows), torch.zeros(num_rows))
    rows.temperatures[::5] = 0
    logits = random_logits(num_rows, 97, "tied")
    seeds, positions = torch.arange(num_rows) - 15, torch.arange(num_rows) + 5
    expected = sampling.choose_tokens(logits, *rows, seeds, positions, any_sampled=True, any_filtered=False)
    assert torch.equal(choose(logits, rows, seeds, positions, any_filtered=False), expected)


@pytest.mark.usefixtures("small_tiles")
def test_parameters_are_read_by_slot():
    """Rows of one slot, and slots that no row has."""
    columns, slots, keys = mixed_rows(5), torch.tensor([4, 0, 0, 2]), torch.tensor([8, 1, 2, 3])
    logits, seeds = random_logits(4, 101, "gaussian"), torch.arange(5) * 31
    by_row = (Rows(*(column[slots] for column in columns)), seeds[slots])
    for any_filtered in (True, False):
        arguments = {"any_filtered": any_filtered, "processors": None, "workspace": None}
        expected = choose(logits, *by_row, keys, **arguments)
        actual = triton_sampling.choose_tokens(
            *(part.to(DEVICE) for part in (logits, *columns, seeds, keys)), **arguments, slots=slots.to(DEVICE)
        )
        assert torch.equal(actual.cpu(), expected)


def test_strided_logits_are_read_in_place():
    logits = random_logits(3, 90, "gaussian")
    rows = Rows(torch.tensor([0.0, 1.0, 0.5]), torch.zeros(3).long(), torch.ones(3), torch.zeros(3))
    for view in (logits[:, 10:70], logits.t().contiguous().t()):
        expected = sampling.choose_tokens(
            view, *rows, torch.arange(3), torch.arange(3), any_sampled=True, any_filtered=False
        )
        assert torch.equal(choose(view, rows, torch.arange(3), torch.arange(3), any_filtered=False), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of weights that no token has
def test_a_row_without_any_token_left_yields_token_0():
    logits = torch.full((2, 40), float("-inf"))
    rows = Rows(torch.tensor([0.0, 1.0]), torch.tensor([0, 3]), torch.tensor([1.0, 0.9]), torch.tensor([0.0, 0.1]))
    tokens = choose(logits, rows, torch.arange(2), torch.arange(2), any_filtered=True)
    assert tokens.tolist() == [0, 0]


@pytest.mark.usefixtures("small_tiles")
def test_processors_change_logits_as_the_reference_does():
    num_rows, vocab_size = 8, 101
    logits, processors = random_logits(num_rows, vocab_size, "gaussian"), random_processors(num_rows, vocab_size)
    off = Rows(torch.zeros(num_rows), torch.zeros(num_rows).long(), torch.ones(num_rows), torch.zeros(num_rows))
    for part in (
        processors,
        LogitProcessors(penalties=processors.penalties._replace(path_token_ids=None)),
        LogitProcessors(grammar_mask=processors.grammar_mask),
    ):
        actual = triton_sampling.process_logits(
            logits.to(DEVICE), *off.to(DEVICE), any_filtered=False, processors=to_device(part, DEVICE)
        ).cpu()
        assert torch.equal(actual, apply_processors(logits, part))
    seeds = torch.arange(num_rows)
    rows = off._replace(temperatures=torch.tensor([0.0, 0.7] * (num_rows // 2)))
    expected = sampling.choose_tokens(
        logits, *rows, seeds, seeds, any_sampled=True, any_filtered=False, processors=processors
    )
    assert torch.equal(choose(logits, rows, seeds, seeds, any_filtered=False, processors=processors), expected)


@pytest.mark.usefixtures("small_tiles")
def test_a_workspace_is_reused_and_a_small_one_refused():
    workspace = triton_sampling_workspace.SamplingWorkspace(4, 70, DEVICE)
    off = Rows(torch.ones(3), torch.zeros(3).long(), torch.ones(3), torch.zeros(3))
    logits, keys = random_logits(3, 70, "gaussian"), torch.arange(3)
    for seeds in (keys, keys + 9):
        expected = sampling.choose_tokens(logits, *off, seeds, keys, any_sampled=True, any_filtered=False)
        assert torch.equal(choose(logits, off, seeds, keys, any_filtered=False, workspace=workspace), expected)
    five = Rows(*(column[:1].expand(5) for column in off))
    for shape, rows in (((5, 70), five), ((3, 71), off)):
        with pytest.raises(ValueError, match=r"room for 4 rows of 70"):
            choose(torch.zeros(shape), rows, keys, keys, any_filtered=False, workspace=workspace)
    with pytest.raises(ValueError, match="max_rows is 0"):
        triton_sampling_workspace.SamplingWorkspace(0, 70, DEVICE)


def test_no_rows_need_no_launch():
    none = Rows(torch.ones(0), torch.zeros(0).long(), torch.ones(0), torch.zeros(0))
    keys = torch.arange(0)
    assert choose(torch.zeros(0, 9), none, keys, keys, any_filtered=True).shape == (0,)
    assert triton_sampling.process_logits(
        torch.zeros(0, 9, device=DEVICE), *none.to(DEVICE), any_filtered=True, processors=None
    ).shape == (0, 9)


@pytest.mark.parametrize("field", ["output_counts", "prompt_mask"])
def test_tables_that_would_be_copied_are_refused(field):
    processors = random_processors(2, 64)
    strided = torch.cat([getattr(processors.penalties, field)] * 2, dim=1)[:, ::2]
    penalties = processors.penalties._replace(**{field: strided})
    rows = mixed_rows(2)
    with pytest.raises(ValueError, match=rf"{field} has strides .* contiguous"):
        triton_sampling.process_logits(
            torch.zeros(2, 64), *rows, any_filtered=False, processors=LogitProcessors(penalties)
        )


REAL_SHAPES = [(1, 32000), (1, 151936), (64, 151936), (7, 128256), (33, 262144)]


@pytest.mark.parametrize(("num_rows", "vocab_size"), REAL_SHAPES, ids=[f"R{r}-V{v}" for r, v in REAL_SHAPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
class TestOnGpu:
    pytestmark = gpu

    def test_filters_at_real_shapes(self, num_rows, vocab_size, dtype):
        rows, logits = mixed_rows(num_rows), (random_logits(num_rows, vocab_size, "gaussian") * 2).to(dtype)
        processed = sampling.process_logits(logits.cuda(), *rows.to("cuda")).cpu()
        expected = sorted_reference(logits, rows)
        differing = (processed.isinf() != expected.isinf()).sum(dim=1)
        # The mass is rounded differently, which may move the edge by a token and no further.
        assert differing.max() <= 1
        both = ~(processed.isinf() | expected.isinf())
        assert torch.equal(processed[both], expected[both])

    def test_a_row_gets_the_same_token_alone(self, num_rows, vocab_size, dtype):
        rows = mixed_rows(num_rows).to("cuda")
        logits = random_logits(num_rows, vocab_size, "gaussian").to(dtype).cuda()
        seeds, positions = torch.arange(num_rows, device="cuda"), torch.arange(num_rows, device="cuda") + 3
        together = sampling.choose_tokens(logits, *rows, seeds, positions, any_sampled=True, any_filtered=True)
        for row in range(0, num_rows, 5):
            at = slice(row, row + 1)
            alone = sampling.choose_tokens(
                logits[at],
                *(column[at] for column in rows),
                seeds[at],
                positions[at],
                any_sampled=True,
                any_filtered=True,
            )
            assert alone.item() == together[row].item()

    def test_tokens_are_the_references(self, num_rows, vocab_size, dtype):
        rows = mixed_rows(num_rows)
        logits = random_logits(num_rows, vocab_size, "gaussian").to(dtype)
        processors = random_processors(num_rows, vocab_size)
        seeds, positions = torch.arange(num_rows), torch.arange(num_rows) + 3
        arguments = (logits, *rows, seeds, positions)
        for flags in (
            {"any_filtered": True},
            {"any_filtered": False},
            {"any_filtered": True, "processors": processors},
        ):
            expected = sampling.choose_tokens(*arguments, any_sampled=True, **flags)
            if "processors" in flags:
                flags["processors"] = to_device(processors, "cuda")
            actual = sampling.choose_tokens(*(part.cuda() for part in arguments), any_sampled=True, **flags).cpu()
            # The two logarithms' last bit may settle a near tie the other way.
            assert (actual != expected).sum() <= 1

    def test_a_captured_choice_follows_its_inputs(self, num_rows, vocab_size, dtype):
        rows = mixed_rows(num_rows).to("cuda")
        logits = random_logits(num_rows, vocab_size, "gaussian").to(dtype).cuda()
        seeds, positions = torch.arange(num_rows, device="cuda"), torch.arange(num_rows, device="cuda")
        workspace = sampling.sampling_workspace(num_rows, vocab_size, "cuda")

        def run() -> torch.Tensor:
            return sampling.choose_tokens(
                logits, *rows, seeds, positions, any_sampled=True, any_filtered=True, workspace=workspace
            )

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for step in range(3):
            logits.copy_(logits.roll(101, dims=1))
            positions += 1
            rows.top_ks.copy_(rows.top_ks.roll(1))
            rows.temperatures.copy_(rows.temperatures.roll(1))
            graph.replay()
            replayed = captured.clone()
            assert torch.equal(replayed, run()), f"replay {step}"
