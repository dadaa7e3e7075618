"""Bodies of every kind for a real engine: never a fault of the server, and nothing is left in the engine."""

import asyncio
import os
import random
import time
from collections import Counter

from meshwright.serve.frontend import Frontend
from meshwright.serve.http.app import make_app
from meshwright.serve.http.served import served_model
from meshwright.serve.opening import open_engine
from meshwright.serve.options import EngineOptions
from tests.clients.server import Server
from tests.serve.http.test_fuzz import FIELDS, body_of

NUM_BODIES = int(os.environ.get("FUZZ_BODIES", "100000"))
AT_ONCE = 64
GOES_EARLY = 0.05
"""Share of the clients that go before their answer is there."""


class Client:
    """Calls an app as a web server does; may go at any time."""

    def __init__(self, app, chance):
        self.app, self.chance = app, chance

    async def post(self, path, raw):
        """The status, 0 for a client that went before there was one."""
        status, gone, sent = 0, asyncio.Event(), False
        if self.chance.random() < GOES_EARLY:
            asyncio.get_running_loop().call_later(self.chance.random() * 0.05, gone.set)

        async def receive():
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            nonlocal status
            status = message.get("status", status)

        head = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        head |= {"headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"}, "http_version": "1.1"}
        await self.app({**head, "scheme": "http", "root_path": "", "server": ("test", 80)}, receive, send)
        return status


def test_no_body_makes_a_real_engine_fail(folder, capsys):
    options = EngineOptions(max_len=48, max_requests=16, cache_bytes=2e5, mesh={"tensor": 1})
    opened = open_engine(folder, options, in_background=False)
    engine, chance, statuses = opened.engine, random.Random(11), Counter()
    room = engine.state().pages_used

    async def run():
        frontend = Frontend(engine)
        app = make_app(frontend, served_model(opened.source, "toy"))
        async with app.router.lifespan_context(app):
            client, left = Client(app, chance), iter(range(NUM_BODIES))

            async def work():
                for _ in left:
                    path = chance.choice(list(FIELDS))
                    raw = body_of(chance, *FIELDS[path])
                    status = await client.post(path, raw)
                    statuses[status] += 1
                    assert status < 500, (path, raw)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            while engine.has_work or frontend.in_system:
                await asyncio.sleep(0.01)
            assert frontend.failure == ""
            assert frontend.in_system == 0

    start = time.perf_counter()
    asyncio.run(run())
    state = engine.state()
    with capsys.disabled():
        print(f"\n{NUM_BODIES:,} bodies in {time.perf_counter() - start:.0f} s: {dict(sorted(statuses.items()))}")
        print(state)
    assert sum(statuses.values()) == NUM_BODIES
    assert statuses[200] > 0.1 * NUM_BODIES
    assert (state.running, state.waiting, state.pages_used) == (0, 0, room)


def test_schemathesis(client, folder, tmp_path):
    with Server(folder, "--max-len", "64", "--api-key", "key", log=tmp_path / "log") as server:
        said = client(
            *("schemathesis", "run", server.url + "/openapi.json", "--header", "Authorization: Bearer key"),
            # what a body may be depends on the model too: its template, its positions, its tokenizer
            *(
                "--checks",
                "all",
                "--exclude-checks",
                "positive_data_acceptance",
                "--max-examples",
                "100",
                "--seed",
                "1",
                "--request-timeout",
                "60",
            ),
        )
        assert "No issues found" in said, said[-6_000:]
        found = server.rest()
        assert found["kv_cache_usage_perc"] == 0
        assert server.get("/health")
