"""Continuous batching written down a second time: one step after the other, one request and one token at a time."""

import math


def serve(traffic, limits, clock):
    """First tokens and ends of all requests on one replica, chunked or interleaved, without a prefix cache."""
    state = [
        {"number": n, "arrival": a, "prompt": p, "output": o, "cached": 0, "made": 0, "known": p}
        for n, (a, p, o) in enumerate(
            zip(traffic.arrival_s.tolist(), traffic.prompt.tolist(), traffic.output.tolist(), strict=True)
        )
    ]
    coming, waiting, running = list(state), [], []
    first, ended, now = {}, {}, 0.0

    def held():
        return sum(one["pages"] for one in running)

    def admit(most_tokens):
        head = waiting[0]
        need = math.ceil(head["known"] / limits.page_len)
        spare = int(limits.watermark * limits.num_pages) if running else 0
        fits = need + spare <= limits.num_pages - held() and len(running) < limits.max_requests
        if not fits or head["known"] > most_tokens:
            return False
        head["pages"], head["decodes"] = need, False
        running.append(waiting.pop(0))
        return True

    def make_room():
        """Whether nobody was preempted."""
        kept = True
        for one in list(running):
            if one in running and one["decodes"] and one["cached"] == one["pages"] * limits.page_len:
                while one in running and held() == limits.num_pages:
                    victim, kept = running.pop(), False
                    victim.update(cached=0, known=victim["prompt"] + victim["made"])
                    waiting.insert(0, victim)
                if one in running:
                    one["pages"] += 1
        return kept

    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0]["arrival"])
        while coming and coming[0]["arrival"] <= now:
            waiting.append(coming.pop(0))
        chunks, decode = [], []
        if limits.policy == "chunked":
            kept = make_room()
            decode = [one for one in running if one["decodes"]]
            budget = limits.token_budget - len(decode)
            for one in running:
                if not one["decodes"] and budget:
                    chunks.append((one, min(budget, one["known"] - one["cached"])))
                    budget -= chunks[-1][1]
            while kept and waiting and budget and admit(math.inf):
                chunks.append((running[-1], min(budget, running[-1]["known"])))
                budget -= chunks[-1][1]
        else:
            budget = limits.token_budget
            while waiting and admit(budget if chunks else math.inf):
                chunks.append((running[-1], running[-1]["known"]))
                budget -= chunks[-1][1]
            if not chunks:
                make_room()
                decode = list(running)
        tokens = sum(num for _, num in chunks)
        before = sum(one["cached"] + at for one, num in chunks for at in range(num))
        cached = sum(one["cached"] for one in decode)
        now += float(clock.step_s(len(decode), cached, tokens, before / tokens if tokens else 0.0))
        for one, num in chunks:
            one["cached"] += num
            if one["cached"] == one["known"]:
                one["decodes"] = True
                one["made"] += 1
                first.setdefault(one["number"], now)
        for one in decode:
            one["cached"] += 1
            one["made"] += 1
        for one in [one for one in running if one["made"] == one["output"]]:
            running.remove(one)
            ended[one["number"]] = now
    return [first[n] for n in range(len(state))], [ended[n] for n in range(len(state))]
