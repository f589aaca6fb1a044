"""A pool of drafters, with a clock that only sleeping moves: lives of drafters, placement and waiting."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.drafter_messages import DrafterStatus
from wingbeat.deployments.shared_drafters.drafter_pool import by_load, overloaded
from wingbeat.deployments.shared_drafters.pool_drafter import RETRY_S, PoolDrafter
from wingbeat.deployments.shared_drafters.pool_member import ASK_S, PATIENCE_S, PoolMember
from wingbeat.deployments.shared_drafters.shared_drafter import Candidate, Placed

HERE, THERE = "here", "there"
COMPLAINT_S = 5.0


class Over(Exception):
    """The end of a scenario."""


class FakeTime:
    """Sleeping takes no time and moves the clock."""

    def __init__(self, ends_at: float = 1e9) -> None:
        self.now = 0.0
        self.ends_at = ends_at

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.ends_at:
            raise Over


class FakeDrafter:
    """A drafter with scripted status and scripted answers to verifiers."""

    def __init__(self, status: Callable[[], DrafterStatus], refusals: tuple[str | None, ...] = ()) -> None:
        self.told = status
        self.refusals = list(refusals)
        self.attached: list[tuple[str, int, bytes | None]] = []
        self.detached: list[str] = []
        self.killed: list[ActorProcess | None] = []
        self.renewals = 0
        """Processes that its actor can begin after the first one."""
        self.renewed: Callable[[], None] = lambda: None

    async def status(self) -> DrafterStatus:
        return self.told()

    async def attach(self, channel_name: str, incarnation: int, terms: bytes | None) -> Placed:
        if not self.refusals:
            raise ConnectionError("the actor died")
        self.attached.append((channel_name, incarnation, terms))
        return Placed(7, self.refusals.pop(0))

    def detach(self, channel_name: str) -> None:
        self.detached.append(channel_name)

    async def renew(self) -> bool:
        if not self.renewals:
            return False
        self.renewals -= 1
        self.renewed()
        return True

    def kill(self, process: ActorProcess | None) -> None:
        self.killed.append(process)


def status(*channels: str, node: str = THERE, silent_s: float = 0.0) -> DrafterStatus:
    return DrafterStatus(ActorProcess(node, 4321, 0), channels, silent_s)


def member(number: int, *channels: str, node: str = HERE) -> PoolMember:
    """A member that is alive and serves verifiers with these channels."""
    made = PoolMember(number, start=lambda: None, complaint_s=COMPLAINT_S)
    made.status = status(*channels, node=node)
    return made


def lives(until_s: float, *scripts: Callable[[float], DrafterStatus], before: Callable[[PoolMember], None] = id):
    """Start times of a member's drafters, and the drafters; `scripts` map a drafter's age to its status."""
    time, started, made = FakeTime(until_s), [], []

    def start() -> FakeDrafter:
        born = time.now
        script = scripts[min(len(made), len(scripts) - 1)]
        started.append(born)
        made.append(FakeDrafter(lambda: script(time.now - born)))
        return made[-1]

    async def main() -> None:
        one = PoolMember(0, start=start, complaint_s=COMPLAINT_S, sleep=time.sleep, clock=time.clock, back_off_s=1.0)
        before(one)
        with pytest.raises(Over):
            await one.run()

    asyncio.run(main())
    return started, made


def dies_at(age: float) -> Callable[[float], DrafterStatus]:
    def script(now: float) -> DrafterStatus:
        if now >= age:
            raise ConnectionError("the actor died")
        return status()

    return script


def test_a_drafter_that_dies_gets_a_new_process_of_its_actor_while_there_is_one():
    time, drafters, ages = FakeTime(300.0), [], []

    def start() -> FakeDrafter:
        born = [time.now]

        def age() -> DrafterStatus:
            return dies_at(70.0)(time.now - born[0])

        def begin_again() -> None:
            ages.append(time.now)
            born[0] = time.now

        drafters.append(FakeDrafter(age))
        drafters[-1].renewals, drafters[-1].renewed = 2, begin_again
        return drafters[-1]

    async def main() -> None:
        one = PoolMember(0, start=start, complaint_s=COMPLAINT_S, sleep=time.sleep, clock=time.clock)
        with pytest.raises(Over):
            await one.run()
        assert one.num_started == 5

    asyncio.run(main())
    assert ages[:3] == [70.0, 140.0, 280.0]
    assert drafters[0].killed == [status().process]


def test_a_drafter_that_dies_is_replaced_at_once_and_one_that_never_starts_less_and_less_often():
    started, made = lives(200.0, dies_at(100.0), dies_at(0.0))
    assert started[:6] == [0.0, 100.0, 101.0, 103.0, 107.0, 115.0]
    # The process of a member that never loaded is unknown.
    assert [drafter.killed for drafter in made] == [[status().process]] + [[None]] * (len(made) - 1)


@pytest.mark.parametrize(("blamed", "after_s"), [(True, COMPLAINT_S), (False, PATIENCE_S)])
def test_a_drafter_whose_thread_hangs_is_replaced_sooner_where_a_verifier_has_left_it(blamed: bool, after_s: float):
    def script(now: float) -> DrafterStatus:
        return status(silent_s=now)

    def blame(one: PoolMember) -> None:
        if blamed:
            one.blame()
            # A drafter that has just reported is not stuck, so the complaint is made later.
            sleep = one._sleep

            async def complain(seconds: float) -> None:
                one.blame()
                await sleep(seconds)

            one._sleep = complain

    started, _ = lives(after_s + 5 * ASK_S, script, before=blame)
    assert after_s <= started[1] <= after_s + 2 * ASK_S


def test_the_least_loaded_within_reach_comes_first_and_who_was_sent_counts():
    members = [member(0, "a", "b"), member(1, "c"), member(2, node=THERE), member(3)]
    members[3].status = None
    assert [one.number for one in by_load(members, HERE)] == [1, 0]
    members[1].num_promised += 2
    assert [one.number for one in by_load(members, HERE)] == [0, 1]
    assert [one.number for one in by_load(members, "elsewhere")] == []


def test_a_drafter_lets_one_go_where_another_of_its_node_has_two_fewer():
    full = member(0, "a", "b")
    assert overloaded([full, member(1)]) == [full]
    assert overloaded([full, member(1, "c")]) == []
    assert overloaded([full, member(1, node=THERE)]) == []


def test_over_nodes_the_nearest_comes_first_until_it_has_two_more():
    members = [member(0), member(1, node=THERE)]
    members[0].num_promised = 1
    assert [one.number for one in by_load(members, HERE, spans_nodes=True)] == [1, 0]
    members[1].num_promised = 1
    assert [one.number for one in by_load(members, HERE, spans_nodes=True)] == [0, 1]
    assert [one.number for one in by_load(members, THERE, spans_nodes=True)] == [1, 0]
    assert len(by_load(members, "a node without drafters", spans_nodes=True)) == 2
    assert [one.number for one in by_load(members, HERE)] == [0]


@pytest.mark.parametrize("numbers", [(2, 0), (5, 1), (3, 3), (4, 1)])
def test_over_nodes_whoever_is_let_go_does_not_come_back_and_that_ends(numbers: tuple[int, int]):
    members = [member(0), member(1, node=THERE)]
    for one, number in zip(members, numbers, strict=True):
        one.num_promised = number
    for _ in range(sum(numbers)):
        released = overloaded(members, spans_nodes=True)
        if not released:
            break
        (left,) = released
        left.num_promised -= 1
        goes_to = by_load(members, HERE, spans_nodes=True)[0]
        assert goes_to is not left
        goes_to.num_promised += 1
    assert not overloaded(members, spans_nodes=True)
    assert abs(members[0].num_promised - members[1].num_promised) < 2


class FakePool:
    """A pool with scripted lists of candidates, one per call."""

    def __init__(self, *answers: list[FakeDrafter]) -> None:
        self.answers = list(answers)
        self.left_by: list[int] = []

    async def candidates(self) -> list[Candidate]:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [Candidate(number, drafter) for number, drafter in enumerate(found)]

    def left(self, number: int) -> None:
        self.left_by.append(number)


def place(pool: FakePool, ends_at: float = 1e9, then: Callable[[PoolDrafter], Awaitable[None]] | None = None):
    """Place a verifier: process id of its drafter or None, the incarnations it used, and the handle."""
    used: list[int] = []
    time = FakeTime(ends_at)

    def next_incarnation() -> int:
        used.append(len(used) + 1)
        return used[-1]

    async def main() -> tuple[int | None, PoolDrafter]:
        drafter = PoolDrafter(pool, b"terms", sleep=time.sleep, clock=time.clock)
        try:
            return await drafter.attach("channel", next_incarnation), drafter
        except Over:
            return None, drafter

    pid, drafter = asyncio.run(main())
    return pid, used, drafter, time.now


def test_a_verifier_tries_one_drafter_after_the_other_each_under_a_new_incarnation():
    gone, full, good = FakeDrafter(status), FakeDrafter(status, ("full",)), FakeDrafter(status, (None,))
    pool = FakePool([gone, full, good])
    pid, used, drafter, _ = place(pool)
    assert (pid, used) == (7, [1, 2, 3])
    assert good.attached == [("channel", 3, b"terms")]
    assert (gone.detached, full.detached, pool.left_by) == (["channel"], [], [0])
    assert not drafter.lacks_room
    drafter.kill()
    assert (good.detached, good.killed, pool.left_by) == (["channel"], [], [0, 2])
    drafter.kill()
    assert good.detached == ["channel"]


def test_a_verifier_without_a_drafter_waits_until_there_is_one():
    good = FakeDrafter(status, (None,))
    pid, used, _, waited_s = place(FakePool([], [], [], [good]))
    assert (pid, used, waited_s) == (7, [1], 3 * RETRY_S)


def test_want_of_room_is_said_once_and_counts_as_such_only_where_all_refuse(caplog: pytest.LogCaptureFixture):
    full = FakeDrafter(status, ("the verifier runs 4 sequences, and 0 slots are left",) * 100)
    pid, _, drafter, _ = place(FakePool([full]), ends_at=20.0)
    assert pid is None
    assert drafter.lacks_room
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "No drafter of the pool: no room (the verifier runs 4 sequences, and 0 slots are left); decoding without "
        "drafts until there is one"
    ]
    *_, drafter, _ = place(FakePool([full, FakeDrafter(status)]), ends_at=20.0)
    assert not drafter.lacks_room
