"""What other last bits do to tokens and to choices of experts: the comparison, and a real answer three ways."""

from __future__ import annotations

import pytest

from node.commands.verify_decisions import Decoded, decisions, describe, difference, document, selections
from node.models.index import read_model
from rigs.random_models import Shape, moe_model


def decoded(tokens: str, *, experts: int = 0, shift: float = 0.0) -> Decoded:
    """Two layers, of which the second chooses `experts` for each token after the first."""
    ids = tuple(map(ord, tokens))
    chosen = [(layer, frozenset({layer, experts})) for _ in ids[1:] for layer in (3, 4)]
    return Decoded(ids, tuple({one: -0.5 + shift, 7: -2.0} for one in ids), tuple(chosen))


def test_equal_choices_differ_in_nothing() -> None:
    found = difference(decoded("abcde"), decoded("abcde"))
    assert (found.n_tokens, found.n_other, found.first_difference) == (5, 0, None)
    assert (found.logprob_rms, found.logprob_max, found.n_selections, found.n_changed) == (0, 0, 8, 0)


def test_every_token_is_compared() -> None:
    a, b = decoded("abcde", experts=1), decoded("abXdZ", experts=2, shift=0.25)
    found = difference(a, b)
    assert (found.n_tokens, found.n_other, found.first_difference) == (5, 2, 2)
    # a, b and d of both, and after each beginning 7, which has the same probability in both.
    assert found.logprob_max == 0.25 and found.logprob_rms == pytest.approx((3 * 0.25**2 / 8) ** 0.5)
    assert (found.n_selections, found.n_changed) == (8, 8)
    assert difference(decoded(""), decoded("")).logprob_rms == 0
    with pytest.raises(ValueError, match="shorter"):
        difference(decoded("abc"), decoded("ab"))


def test_choices_are_put_together_from_the_calls_of_several_servers() -> None:
    def call(t: float, layer: int, experts: list[int], rows: int = 1) -> dict[str, object]:
        return {"t": t, "layer": layer, "experts": experts, "rows": rows}

    prompt = [call(1, 0, [0, 1, 0, 2], 3), call(1.1, 0, [5, 6], 2), call(1.2, 1, [3])]
    first = [call(2, 0, [1]), call(2.1, 0, [5]), call(2.2, 1, [2, 7])]
    second = [call(3, 0, [6, 7]), call(3.2, 1, [2]), call(3.3, 1, [4])]
    again = [call(2.15, 0, [5])]  # its server ended before it answered
    found = selections([*second, *prompt, *again, *first])
    assert found == ((0, frozenset({1, 5})), (1, frozenset({2, 7})), (0, frozenset({6, 7})), (1, frozenset({2, 4})))


def test_of_one_layer_every_token_is_a_choice() -> None:
    calls = [{"t": t, "layer": 2, "experts": experts, "rows": 1} for t, experts in enumerate([[1], [4], [1], [5]])]
    assert selections(calls) == ((2, frozenset({1, 4})), (2, frozenset({1, 5})))


def test_it_is_said_in_words() -> None:
    found = {"stock": decoded("abc"), "rows": decoded("abc"), "sum": decoded("aXc", experts=1, shift=0.5)}
    lines = describe(document(found))
    assert lines[0].startswith("rows, stock: all 3 tokens are the same; log-probabilities differ by 0.0e+00")
    assert "sum, stock: 1 of 3 tokens are others, the first is number 1" in lines[1]
    assert "of 4 choices of experts, 4 are others" in lines[2]


@pytest.mark.slow
async def test_rows_decide_as_one_machine_does() -> None:
    index = read_model(moe_model(Shape("qwen3moe"), "Q4_K_M"))
    n_tokens, n_layers, n_used = 12, 4, 4
    found = await decisions(index, n_tokens=n_tokens)
    rows, total = difference(found["rows"], found["stock"]), difference(found["sum"], found["rows"])
    assert (rows.n_tokens, rows.first_difference, rows.logprob_max) == (n_tokens, None, 0)
    for name in ("rows", "sum"):
        chosen = found[name].selections
        assert [layer for layer, _ in chosen] == list(range(n_layers)) * (n_tokens - 1)
        assert {len(experts) for _, experts in chosen} == {n_used}
    assert total.n_selections > 0 and total.logprob_max < 0.5
    # A choice that changes is of two experts that are nearly equal: rare.
    assert total.n_changed <= total.n_selections / 4
