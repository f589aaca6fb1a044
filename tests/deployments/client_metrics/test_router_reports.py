"""Counts reported by routers are never lost and never counted twice."""

from wingbeat.deployments.client_metrics.client_figures import RouterFigures, one_two_five
from wingbeat.deployments.client_metrics.router_reports import GONE_S, RECENT_S, RouterReports


class World:
    """Routers, an engine's reports, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.reports = RouterReports(lambda: self.now)
        self.routers = {name: RouterFigures(name) for name in ("r1", "r2")}

    def serve(self, name: str, count: int = 1) -> None:
        figures = self.routers[name].of_engine("a", 64)
        for _ in range(count):
            figures.e2e_s.observe(0.4)
            figures.ended["stop"] += 1

    def report(self, name: str) -> dict:
        report = self.routers[name].report("a")
        self.reports.add(report)
        return report

    def told(self) -> tuple[int, int]:
        clients = self.reports.clients()
        return sum(clients["e2e_s"]["counts"]), clients["ended"]["stop"]


def test_reports_are_summed_over_routers_and_not_over_time():
    world = World()
    for count in (2, 3):
        for name in world.routers:
            world.serve(name, count)
            world.report(name)
    assert world.told() == (10, 10)


def test_every_figure_that_is_no_bound_is_summed():
    world = World()
    for name in world.routers:
        figures = world.routers[name].of_engine("a", 64)
        figures.span_tokens = {"image": 5}
        world.serve(name)
        world.report(name)
    clients = world.reports.clients()
    numbers = {name: value for name, value in clients.items() if isinstance(value, int)}
    assert numbers == {"max_model_len": 64}
    assert clients["span_tokens"] == {"image": 10}
    assert clients["e2e_s"]["bounds"] == world.routers["r1"].report("a")["clients"]["e2e_s"]["bounds"]


def test_an_older_report_that_arrives_late_changes_nothing():
    world = World()
    world.serve("r1")
    late = world.routers["r1"].report("a")
    world.serve("r1")
    world.report("r1")
    world.reports.add(late)
    assert world.told() == (2, 2)


def test_what_a_router_counted_stays_when_it_is_gone():
    world = World()
    for name in world.routers:
        world.serve(name)
        world.report(name)
    world.now += GONE_S + 1
    world.report("r2")
    assert world.told() == (2, 2)
    world.now += GONE_S + 1
    world.report("r2")
    assert world.told() == (2, 2)


def test_a_silent_router_shows_no_present_state():
    world = World()
    world.report("r1")
    world.now += RECENT_S + 1
    world.report("r2")
    assert set(world.reports.routers()) == {"r2"}


def test_an_engine_that_no_client_used_has_no_latencies():
    world = World()
    assert world.reports.clients() is None
    world.report("r1")
    assert world.reports.clients() is None


def test_bounds_of_token_numbers_stop_at_the_context():
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(4096)[-1] == 2000
    assert one_two_five(1) == (1,)
