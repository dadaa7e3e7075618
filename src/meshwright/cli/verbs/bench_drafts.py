"""`meshwright bench drafts`: speculative decoding with several numbers of drafts."""

from pathlib import Path

import msgspec

from meshwright.cli.engine import EngineGiven, open_given
from meshwright.cli.output import busy_words, say, three_digits
from meshwright.cli.verb import PNG, Count, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.progress import tracked
from meshwright.core.units import counted
from meshwright.report.answer import Answer, Condition, Table, TableColumns

COLUMNS: TableColumns = {
    "drafts": ("num_drafts", None, "drafts"),
    "tokens/s": ("tokens_per_s", three_digits),
    "speed-up": ("speedup", "{:.2f}".format),
    "predicted": ("predicted_speedup", "{:.2f}".format),
    "accepted": ("accepted", lambda share: "-" if share != share else f"{share:.0%}"),
    "tokens a step": ("step_tokens", "{:.2f}".format),
    "time of a step": "step_s",
}


class Given(EngineGiven, group="Drafts"):
    what: Path = argument(metavar="FOLDER")
    prompts: Path = option("A file of JSON lines, as generate reads it.")
    counts: str = option("Numbers of drafts in a step.", default="1,2,4,8")
    max_tokens: Count = option("Most tokens after a prompt whose line has no max_tokens.", default=128)
    temperature: float = option("Temperature of a prompt whose line has none.", default=0.0)
    png: Path | None = PNG


def _counts(text: str) -> list[int]:
    """Returns the numbers of drafts in ``"1,2,4"``, ascending. Raises InputError for another text."""
    try:
        draft_counts = sorted({int(count) for count in text.split(",")})
    except ValueError:
        draft_counts = [0]
    if draft_counts[0] < 1:
        raise InputError(f"--counts {text} must be whole numbers of at least 1, such as 1,2,4.")
    return draft_counts


@verb(Given, needs="run")
def command(given: Given) -> Answer:
    """Measure speculative decoding: the same prompts without drafts and with each number of drafts.

    The tokens are the same each time. The predicted speed-up takes the measured times of steps, and the tokens of a
    step if every draft were accepted with the probability measured for the fewest drafts (Leviathan et al. 2022).
    """
    if not given.draft:
        raise InputError("nothing proposes tokens. Give --draft ngram, or the folder of a smaller model.")
    draft_counts = _counts(given.counts)
    from meshwright.bench.serving.drafts import measure_drafts, predicted_speedups
    from meshwright.report.machine.serving import load_figure
    from meshwright.serve.drawing.sampling import Sampling
    from meshwright.serve.offline.bulk import USUAL, read_prompts

    sampling = Sampling(temperature=given.temperature)
    base_request = msgspec.structs.replace(USUAL, max_tokens=given.max_tokens, sampling=sampling)
    results = []
    for draft_count in tracked([*draft_counts, 0], "measuring numbers of drafts"):
        varied_options = Given(**vars(given) | ({"num_drafts": draft_count} if draft_count else {"draft": None}))
        opened_engine = open_given(varied_options, in_background=False)
        prompt_lines = read_prompts(opened_engine.source, opened_engine.engine.check, given.prompts, base_request)
        requests = [line.request for line in prompt_lines]
        results.append(measure_drafts(opened_engine.engine, requests))
        say(f"{counted(draft_count, 'draft')}: {three_digits(results[-1].tokens_per_s)} tokens/s")
    results = [results[-1], *results[:-1]]
    predicted_gains = predicted_speedups(results)
    speedups = [result.tokens_per_s / results[0].tokens_per_s for result in results]
    rows = [msgspec.to_builtins(result) | {"speedup": factor} for result, factor in zip(results, speedups, strict=True)]
    shown_rows = [{**row, "predicted_speedup": factor} for row, factor in zip(rows, predicted_gains, strict=True)]
    x_values = [result.num_drafts for result in results]
    drafting_results = results[1:]
    panels = {
        "speed-up": ("", list(zip(x_values, predicted_gains, strict=True)), list(zip(x_values, speedups, strict=True))),
        "drafts accepted (%)": ("", [], [(result.num_drafts, 100 * result.accepted) for result in drafting_results]),
        "time of a step ({})": ("s", [], [(result.num_drafts, result.step_s) for result in results]),
    }
    title = f"Drafts by {given.draft} for {given.what.name}"
    condition = Condition(f"{counted(len(requests), 'prompt')} of {given.prompts}, temperature {given.temperature:g}")
    facts = {"draft": given.draft, "results": rows, "predicted": predicted_gains}
    draw_by_path = {given.png: lambda: load_figure(panels, x="drafts of a step", title=title)}
    return Answer(facts, [Table.of(shown_rows, COLUMNS), *busy_words(), condition], draw_by_path)
