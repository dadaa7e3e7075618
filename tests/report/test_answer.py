"""Tables for other programs."""

from meshwright.report.answer import (
    Condition,
    Detail,
    Paragraph,
    Symbols,
    Table,
    as_csv,
    as_markdown,
    as_text,
    render,
    tables_of,
)

TABLE = Table(["name", "size", "ratio"], [["a,b", 1000, 3.5], ["c|d", None, 1 / 3]])


def test_csv_keeps_raw_numbers():
    assert as_csv(TABLE) == f'name,size,ratio\n"a,b",1000,3.5\nc|d,,{1 / 3}\n'


def test_lists_and_dictionaries_are_no_python():
    found = Table(["offload", "axes", "mesh"], [[("optimizer", "activations"), (), {"fsdp": 4, "tensor": 2}]])
    assert as_csv(found) == 'offload,axes,mesh\noptimizer+activations,,"fsdp=4,tensor=2"\n'
    assert "| optimizer+activations |      | fsdp=4,tensor=2 |" in as_markdown(found)


def test_every_field_as_it_is():
    rows = [{"name": "a", "axes": ["x"]}, {"name": "b", "axes": []}]
    assert as_csv(Table.as_is(rows)) == "name,axes\na,x\nb,\n"
    assert as_csv(Table.as_is([Paragraph("a")])) == "text,indent\na,2\n"


def test_a_cell_of_several_lines_is_one_line_of_markdown():
    assert as_markdown(Table(["mesh"], [["fsdp 4\ntensor 2"]])).splitlines()[2] == "| fsdp 4<br>tensor 2 |"


def test_markdown_aligns_numbers_and_escapes():
    assert as_markdown(TABLE).splitlines() == [
        "| name |  size |  ratio |",
        "| ---- | ----: | -----: |",
        "| a,b  | 1,000 |    3.5 |",
        "| c\\|d |     - | 0.3333 |",
    ]


def test_lines_of_a_cell_hang_where_they_wrap():
    """Rich alone would begin a further line where the cell begins."""
    rows = [["1 x 1 chip, batch 16,384\n  prefill on 6 x fsdp2 tp4", 1.5, "parameters"], ["8 x tp8\n  fp8", 2.5, "KV"]]
    assert render(["engines", "TTFT", "bound by"], rows, 36).splitlines()[2:] == [
        "1 x 1 chip, batch   1.5  parameters",
        "  16,384",
        "  prefill on 6 x",
        "    fsdp2 tp4",
        "8 x tp8             2.5  KV",
        "  fp8",
    ]


PIECES = [
    Condition("rates are of the data sheet"),
    "12 B T^2 FLOPs for 1 T tokens",
    Table(["step"], [[number] for number in range(5)], "Steps", first=2),
    Detail("3 limits", [Table(["limit"], [[1], [2], [3]])]),
    *(Condition(f"condition {number}, " + "which is long " * 5) for number in range(3)),
    Condition("rates are of the data sheet"),
    Symbols({"B": "sequences", "T": "positions", "N": "heads"}),
]


def test_a_text_is_an_answer_what_it_rests_on_and_how_to_ask_for_more():
    lines = "\n".join(as_text(PIECES, 60, more=())).splitlines()
    assert lines[0] == "12 B T^2 FLOPs for 1 T tokens"
    assert lines[1:6] == ["Steps", "step", "────", "   0", "   1"]
    assert lines[7:] == [
        "rates are of the data sheet",
        "condition 0, which is long which is long which is long which",
        "  is long which is long",
        "B sequences, T positions",
        "more: --notes (2 more), --all (5 rows of Steps, 3 limits),",
        "  --symbols",
    ]


def test_a_symbol_counts_where_it_is_no_unit():
    assert list(as_text(["1 T tokens", PIECES[-1]], 60, more=())) == ["1 T tokens", "more: --symbols"]


def test_more_prints_every_row_detail_condition_and_symbol():
    lines = "\n".join(as_text(PIECES, 60)).splitlines()
    assert sum(line.strip().isdigit() for line in lines) == 8
    assert sum(line.startswith("condition") for line in lines) == 3
    assert lines[-3:] == [f"{name:<18}{text}" for name, text in PIECES[-1].meanings.items()]
    assert len(tables_of(PIECES)) == 2
