"""The prefix cache finds as much with speculation as without, turn by turn."""

from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, new_engine, reference


def hits(ref, drafter, speculation):
    """Cached and looked-up tokens after each turn of growing conversations, and the conversations."""
    engine = new_engine(ref.loaded, engine_config(TREE, max_num_seqs=4, num_kv_blocks=400), drafter)
    chats, found = [list(prompt) for prompt in ref.prompts], []
    try:
        for turn in range(3):
            answers = Run(engine, chats, greedy_params(13, speculation=speculation)).finish()
            chats = [chat + answer + [turn, 2, 3] for chat, answer in zip(chats, answers, strict=True)]
            found.append((engine.block_manager.hit_tokens, engine.block_manager.query_tokens))
    finally:
        engine.model.remove_taps()
    return found, chats


def test_hits_of_a_conversation_do_not_depend_on_speculation():
    ref = reference("llama")
    plain, drafted = hits(ref, None, False), hits(ref, eagle_drafter(ref.loaded, TREE), True)
    assert plain == drafted
    assert plain[0][-1][0] > plain[0][0][0]
