"""Laws of rows that move between engines: the text is the same, and nothing leaks."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os

import numpy as np
import pytest

from recurrent_families import make_config, make_model, make_wide_model
from specpool import (
    ConfigError,
    Engine,
    Grammar,
    NotReady,
    RequestOutput,
    SamplingParams,
    Shape,
    TransferError,
)
from specpool._core import checksum
from specpool.engine.assets import corpus
from specpool.engine.memory.page_bytes import PageBytes
from specpool.engine.transfer import image as image_module
from specpool.engine.transfer import parcel, shared_memory, tcp
from specpool.engine.transfer.image import Image, Writer
from specpool.testing import assert_no_page_leaked

KEY = b"sixteen bytes at least"
PROMPTS = corpus.prompts(6, 60)
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=3)
DRAWN = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, seed=7)
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 6)
KINDS = {
    "plain": (None, None),
    "eagle chain": ("specpool/tiny-eagle", CHAIN),
    "eagle tree": ("specpool/tiny-eagle", TREE),
    "eagle3 chain": ("specpool/tiny-eagle3", CHAIN),
    "eagle3 tree": ("specpool/tiny-eagle3", TREE),
    "ngram": ("ngram", None),
}


def engine_of(kind: str = "eagle chain", **options):
    draft, shape = KINDS[kind]
    options = {"max_context_len": 256, "page_size": 4, "busy_check": 2} | options
    return Engine.from_pretrained(draft=draft, shape=shape, **options)


def run(engine: Engine) -> None:
    while engine.turn():
        pass


def outputs(told: list) -> list:
    return [item for item in told if not hasattr(item, "pieces")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_session_goes_on_in_another_engine_with_the_same_text(kind, params, depth):
    with engine_of(kind, overlap_depth=depth) as one, engine_of(kind, overlap_depth=depth) as two:
        with one.open_session() as stays:
            wanted = [stays.append(PROMPTS[at], params).output().token_ids for at in range(3)]
        session = one.open_session()
        first = session.append(PROMPTS[0], params).output()
        assert first.token_ids == wanted[0]
        with one.export(session) as export:
            num_held = session.num_tokens
            moved = two.import_row(export.image())
            export.arrived()
        assert session.closed and moved.num_tokens == num_held
        assert_no_page_leaked(one.ledger)
        second = moved.append(PROMPTS[1], params).output()
        assert second.token_ids == wanted[1]
        # All that the row had is there; a drafter's lag, and the last token, are computed again.
        assert second.num_reused >= num_held - 2
        with two.export(moved) as export:
            back = one.import_row(export.image())
            export.arrived()
        assert back.append(PROMPTS[2], params).output().token_ids == wanted[2]
        back.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_decodes_on_in_another_engine(kind, params):
    """Prefill here, decode there."""
    with engine_of(kind) as one, engine_of(kind) as two:
        (wanted,) = one.generate([PROMPTS[2]], params)
        one.forget_prefixes()
        told, ended = [], []
        number = one.submit(PROMPTS[2], params, on_item=lambda number, item: ended.append(item))
        while not ended:
            one.turn()
        with one.export(number) as export:
            assert export.length >= len(PROMPTS[2])
            two.import_row(export.image(), on_item=lambda number, item: told.append(item))
            export.arrived()
        run(one)
        assert ended[-1].finish_reason == "moved"
        run(two)
        output = told[-1]
        assert (output.token_ids, output.text) == (wanted.token_ids, wanted.text)
        assert (output.finish_reason, output.seed) == (wanted.finish_reason, wanted.seed)
        assert output.num_reused >= export.length - 2
        assert [token for item in told[:-1] for token in item.token_ids] == wanted.token_ids
        two.forget_prefixes()
        assert_no_page_leaked(two.ledger)


def test_an_image_is_an_array_or_bytes_and_nothing_else():
    with engine_of() as one, engine_of() as two:
        session = one.open_session()
        session.append(PROMPTS[0], GREEDY).output()
        with one.export(session) as export:
            image = export.image()
        for given in (image, image.tobytes(), bytearray(image), memoryview(image.tobytes())):
            with two.import_row(given) as moved:
                assert moved.tokens == session.tokens
        before = two.ledger.state_hash()
        for wrong in (None, 5, True, "text", [1, 2], b"", image.view(np.int8), image[None]):
            with pytest.raises(TransferError, match=r"image (is|ends)"):
                two.import_row(wrong)
        assert two.ledger.state_hash() == before


@pytest.mark.parametrize("was", ["forked", "given back"])
def test_a_session_moves_while_a_page_copy_into_its_row_waits(was):
    """A fork, or a row that came back, gets the copy of its last page with its next step only."""
    with engine_of() as one, engine_of() as two:
        session = one.open_session()
        session.append(PROMPTS[0][:21], GREEDY).output()
        if was == "forked":
            leaves = session.fork()
        else:
            leaves = session
            one.export(session).give_back()
        with one.export(leaves) as export:
            moved = two.import_row(export.image())
            export.arrived()
        text = session.tokens if was == "forked" else moved.tokens
        (plain,) = two.generate([text + PROMPTS[1]], GREEDY)
        assert moved.append(PROMPTS[1], GREEDY).output().token_ids == plain.token_ids
        moved.close()
        session.close()
        for engine in (one, two):
            engine.forget_prefixes()
            assert_no_page_leaked(engine.ledger)


def test_a_session_whose_row_has_no_tokens_left_moves():
    """A rewind into the page that a fork shares leaves a row without KV: the text goes alone."""
    with engine_of() as one, engine_of() as two:
        session = one.open_session()
        session.append(PROMPTS[0][:21], GREEDY).output()
        copy = session.fork()
        assert session.rewind(3) == 0
        with one.export(session) as export:
            assert export.length == 0
            moved = two.import_row(export.image())
            export.arrived()
        (plain,) = two.generate([moved.tokens + PROMPTS[1]], GREEDY)
        assert moved.append(PROMPTS[1], GREEDY).output().token_ids == plain.token_ids
        moved.close()
        copy.close()
        for engine in (one, two):
            engine.forget_prefixes()
            assert_no_page_leaked(engine.ledger)


def test_a_sample_moves_while_a_page_copy_into_its_row_waits():
    """The copy of the prompt's last page waits for the sample's first round."""
    params = dataclasses.replace(DRAWN, n=3)
    with engine_of() as one, engine_of() as two:
        wanted = [output.token_ids for output in one.generate([PROMPTS[0][:20]], params)]
        one.forget_prefixes()
        told: dict[int, RequestOutput] = {}
        number = one.submit(PROMPTS[0][:20], params)
        one.turn()
        with pytest.raises(NotReady):
            one.ledger.check_quiet(one.core.submitted(number + 1).row)
        for sample in range(3):
            with one.export(number + sample) as export:
                item = lambda _, item, sample=sample: told.update({sample: item})  # noqa: E731
                two.import_row(export.image(), on_item=item)
                export.arrived()
        run(one)
        run(two)
        assert [told[sample].token_ids for sample in range(3)] == wanted
        for engine in (one, two):
            engine.forget_prefixes()
            assert_no_page_leaked(engine.ledger)


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["eagle chain", "plain"])
def test_a_form_goes_along(kind, depth):
    """The receiver follows the output so far through the form, and goes on from there."""
    form = Grammar.regex("([a-d]{3} ){5}[x-z]{4}")
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=5, structured=form)
    with engine_of(kind, overlap_depth=depth) as one, engine_of(kind) as two:
        (wanted,) = one.generate([PROMPTS[1]], params)
        told, ended = [], []
        number = one.submit(PROMPTS[1], params, on_item=lambda number, item: ended.append(item))
        while sum(len(item.token_ids) for item in ended) < 7:
            one.turn()
        with one.export(number) as export:
            image = export.image()
            two.import_row(image, on_item=lambda number, item: told.append(item))
            export.arrived()
        run(one)
        run(two)
        assert told[-1].text == wanted.text and len(wanted.text) == 24
        assert told[-1].finish_reason == "stop"
        state = Image(image, two.layout).state
        assert state["params"]["structured"] == {"kind": "regex", "text": form.text}
        for wrong in (5, "regex", {"kind": "xml", "text": "a"}, {"kind": "regex", "text": 5}):
            state["params"]["structured"] = wrong
            with pytest.raises(
                TransferError, match=r"the state of the image: .* `\$.params.structured"
            ):
                two.import_row(image_of_text(two, [1, 2, 3], state))
        state["params"]["structured"] = {"kind": "regex", "text": "(a"}
        with pytest.raises(ConfigError):
            two.import_row(image_of_text(two, [1, 2, 3], state | {"prompt_len": 3, "forwards": []}))


@pytest.mark.parametrize(
    ("forwards", "why"),
    [
        ([-3], r"`int` >= -1 - at `\$.forwards"),
        ([3, 0], "forward 1 gave 0 tokens"),
        ([2], "gave 2 tokens, the output has 3"),
        ([-1] * 4, "gave 4 tokens, the output has 3"),
    ],
)
def test_forwards_that_did_not_give_the_output_are_refused(forwards, why):
    """A verify gives at least one token, a prefill exactly one."""
    with engine_of("plain") as one, engine_of("plain") as two:
        number = one.submit(PROMPTS[1], GREEDY)
        with one.export(number) as export:
            state = Image(export.image(), two.layout).state
        prompt_len = state["prompt_len"]
        tokens = [1] * (prompt_len + 3)
        with pytest.raises(TransferError, match=why):
            two.import_row(image_of_text(two, tokens, state | {"forwards": forwards}))
        assert not two.core.scheduler.has_requests


def image_of_text(engine: Engine, tokens: list[int], state: dict) -> np.ndarray:
    """Return the image of a text without KV."""
    writer = Writer(engine.layout, length=0, drafted_len=0, tokens=tokens, state=state)
    image = np.empty(writer.num_bytes, np.uint8)
    writer.write(image, lambda run, out: 0)
    return image


def test_a_device_and_a_host_read_and_write_the_same_bytes():
    """A cache on a device goes through the kernels, one on a CPU through memory."""
    with engine_of() as engine:
        session = engine.open_session()
        session.append(PROMPTS[0], GREEDY).output()
        host = engine._moves._pages
        device = copy.copy(host)
        device._host = []
        pages = np.array([2, 3, 4, 9, 1, 7], np.int32)
        for group, page_bytes in enumerate(host.page_bytes):
            read = [np.zeros(len(pages) * page_bytes, np.uint8) for _ in range(2)]
            sums = [
                of.read(group, pages, out) for of, out in zip((host, device), read, strict=True)
            ]
            assert np.array_equal(*read) and read[0].any()
            assert set(sums) == {checksum(read[0])}
            for of in (host, device):
                assert of.write(group, pages + 10, read[0]) == sums[0]
                assert of.read(group, pages + 10, read[1]) == sums[0]
                assert np.array_equal(*read)
                of.write(group, pages + 10, np.zeros_like(read[1]))
        session.close()


def test_what_does_not_arrive_goes_on_where_it_was():
    with engine_of() as engine:
        with engine.open_session() as stays:
            wanted = [stays.append(PROMPTS[at], DRAWN).output().token_ids for at in range(2)]
        engine.forget_prefixes()
        session = engine.open_session()
        session.append(PROMPTS[0], DRAWN).output()
        with engine.export(session) as export:
            held = export.length
            for refused in (lambda: session.append("x"), session.fork, lambda: session.rewind(3)):
                with pytest.raises(ConfigError, match="it is being exported"):
                    refused()
            with pytest.raises(ConfigError, match="being exported"):
                engine.export(session)
            other = engine.generate([PROMPTS[3]], GREEDY)  # others go on meanwhile
            assert other[0].finish_reason == "length"
        second = session.append(PROMPTS[1], DRAWN).output()
        assert second.token_ids == wanted[1] and second.num_reused >= held - 2
        with pytest.raises(ConfigError, match="the export is over"):
            export.image()
        session.close()

        (alone,) = engine.generate([PROMPTS[4]], DRAWN)
        told = []
        number = engine.submit(PROMPTS[4], DRAWN, on_item=lambda number, item: told.append(item))
        while not told:
            engine.turn()
        engine.export(number).give_back()
        run(engine)
        assert told[-1].token_ids == alone.token_ids


@pytest.mark.parametrize("ends", ["close", "abort"])
def test_an_owner_that_ends_on_the_way_leaks_nothing(ends):
    with engine_of() as engine:
        session = engine.open_session()
        session.append(PROMPTS[0], GREEDY).output()
        told = []
        number = engine.submit(PROMPTS[4], GREEDY, on_item=lambda number, item: told.append(item))
        while not told:
            engine.turn()
        if ends == "close":
            export = engine.export(session)
            session.close()
        else:
            export = engine.export(number)
            engine.abort(number)
        assert export.image().size == export.num_bytes  # its pages are there until the end
        export.give_back()
        run(engine)
        session.close()
        engine.forget_prefixes()
        assert_no_page_leaked(engine.ledger)


def test_what_cannot_move_says_why():
    with engine_of() as engine, engine_of("eagle3 chain") as other:
        with pytest.raises(ConfigError, match="no request 5 is running or waiting"):
            engine.export(5)
        session = engine.open_session()
        turn = session.append(PROMPTS[0], GREEDY)
        turn.output()
        with pytest.raises(ConfigError, match="one of this engine's"):
            other.export(session)
        number = engine.submit(PROMPTS[1], GREEDY, session=session)
        with pytest.raises(ConfigError, match="is a turn of session 1: export the session"):
            engine.export(number)
        run(engine)
        with engine.export(session) as export:
            image = export.image()
            with pytest.raises(TransferError, match="models, weights, dtype, drafter"):
                other.import_row(image)
            assert not other.core.scheduler.conversations.open
        session.close()


def in_mid_turn(engine: Engine, num_before: int, num_turns: int, params: SamplingParams):
    """Return a session after so many turns and what its next one tells, so far into that one."""
    session, told = engine.open_session(), []
    for at in range(num_before):
        session.append(PROMPTS[at], params).output()
    engine.submit(
        PROMPTS[num_before], params, session=session, on_item=lambda _, item: told.append(item)
    )
    for _ in range(num_turns):
        engine.turn()
    return session, told


@pytest.mark.sample(1)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["plain", "eagle chain", "eagle tree", "ngram"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("num_turns", [0, 1, 4])
def test_a_session_moves_in_mid_turn(kind, params, depth, num_before, num_turns):
    """The turn ends there, and the next one goes on from it; also if it has not begun."""
    with engine_of(kind, overlap_depth=depth) as one, engine_of(kind, overlap_depth=depth) as two:
        with one.open_session() as stays:
            wanted = [stays.append(PROMPTS[at], params).output().token_ids for at in range(3)]
        one.forget_prefixes()
        session, here = in_mid_turn(one, num_before, num_turns, params)
        there = []
        with one.export(session) as export:
            for refused in (lambda: one.export(session), session.fork):
                with pytest.raises(ConfigError, match="it is being exported"):
                    refused()
            moved = two.import_row(export.image(), on_item=lambda _, item: there.append(item))
            export.arrived()
        assert session.closed and moved.is_busy
        run(one)
        run(two)
        assert outputs(here)[-1].finish_reason == "moved"
        output = outputs(there)[-1]
        assert output.token_ids == wanted[num_before]
        assert output.num_reused >= export.length - 2 and bool(export.length) == bool(num_turns)
        assert (
            moved.append(PROMPTS[num_before + 1], params).output().token_ids
            == (wanted[num_before + 1])
        )
        moved.close()
        for engine in (one, two):
            engine.forget_prefixes()
            assert_no_page_leaked(engine.ledger)


@pytest.mark.parametrize("num_turns", [0, 4])
def test_a_turn_that_does_not_arrive_goes_on_where_it_was(num_turns):
    with engine_of() as engine:
        with engine.open_session() as stays:
            wanted = [stays.append(PROMPTS[at], DRAWN).output().token_ids for at in range(3)]
        engine.forget_prefixes()
        session, told = in_mid_turn(engine, 1, num_turns, DRAWN)
        with engine.export(session) as export:
            engine.turn()
            assert export.image().size == export.num_bytes
        run(engine)
        assert outputs(told)[-1].token_ids == wanted[1]
        assert session.append(PROMPTS[2], DRAWN).output().token_ids == wanted[2]
        session.close()
        session, told = in_mid_turn(engine, 1, num_turns, DRAWN)
        with engine.export(session):
            session.close()  # its client ends it on the way
        run(engine)
        assert outputs(told)[-1].finish_reason == "abort"
        assert not engine.core.scheduler.conversations.open
        engine.forget_prefixes()
        assert_no_page_leaked(engine.ledger)


def test_a_moved_turn_that_is_aborted_leaves_the_session_as_it_was_before():
    chat = [{"role": "user", "content": "The moon"}]
    with engine_of() as one, engine_of() as two:
        for engine in (one, two):
            engine.core.tokenizer.chat_template = (
                "{% for m in messages %}{{ m.content }} {% endfor %}"
            )
        with one.open_session() as stays:
            wanted = [stays.append(chat, GREEDY).output() for _ in range(3)]
        session, told = one.open_session(), []
        session.append(chat, GREEDY).output()
        one.submit(chat, GREEDY, session=session, on_item=lambda _, item: told.append(item))
        while not told:
            one.turn()
        held, ends = session.num_tokens, session.turn_ends
        with one.export(session) as export:
            image = export.image()
            moved = [two.import_row(image) for _ in range(2)]
            export.arrived()
        run(one)
        moved[0].abort()
        assert moved[0].num_tokens == held and moved[0].turn_ends == ends
        run(two)  # to the end of the other one's turn
        for session in moved:
            if session is moved[0]:
                assert session.append(chat, GREEDY).output().token_ids == wanted[1].token_ids
            assert session.append(chat, GREEDY).output().token_ids == wanted[2].token_ids
            session.close()
        state = Image(image, two.layout).state
        tokens = Image(image, two.layout).tokens
        for changes, why in (
            ({"turn": 5}, "Expected `object | null`, got `int`"),
            ({"history": [1, "2"]}, r"Expected `int`, got `str` - at `\$.history"),
            ({"turn": state["turn"] | {"messages": "x"}}, r"got `str` - at `\$.turn.messages"),
            ({"turn": state["turn"] | {"said": 5}}, r"got `int` - at `\$.turn.said"),
            ({"turn": state["turn"] | {"prompt_len": 1 << 40}}, "prompt_len is"),
            ({"history": []}, "a turn of the session ends at token"),
        ):
            with pytest.raises(TransferError, match=why):
                two.import_row(image_of_text(two, tokens, state | changes))
        assert not two.core.scheduler.conversations.open
        two.forget_prefixes()
        assert_no_page_leaked(two.ledger)


@pytest.mark.sample(2)
@pytest.mark.parametrize("leaves", [0, 1, 2])
@pytest.mark.parametrize("turns", [0, 1, 4])
def test_one_of_several_samples_moves_alone(leaves, turns):
    """Before their prompt has KV, in the middle of it, and when each has a row of its own."""
    params = dataclasses.replace(DRAWN, n=3)
    with engine_of(prefill_tokens=16) as one, engine_of() as two:
        wanted = [output.token_ids for output in one.generate([PROMPTS[0]], params)]
        found = {}

        def tell(number, item) -> None:
            if not hasattr(item, "pieces"):
                found[number] = item

        first = one.submit(PROMPTS[0], params, on_item=tell)
        for _ in range(turns):
            one.turn()
        with one.export(first + leaves) as export:
            number = two.import_row(export.image(), on_item=lambda _, item: tell("there", item))
            export.arrived()
        assert number > 0
        run(one)
        run(two)
        assert found[first + leaves].finish_reason == "moved"
        for sample, tokens in enumerate(wanted):
            moved = found["there" if sample == leaves else first + sample]
            assert moved.token_ids == tokens, sample
        for engine in (one, two):
            engine.forget_prefixes()
            assert_no_page_leaked(engine.ledger)


# Families that go on from a state many tokens at once, and one that runs token by token behind it.
HYBRIDS = ["qwen3_next", "falcon_h1", "mamba"]


def hybrid(family: str, kind: str, page_size: int, **options) -> Engine:
    draft, shape = KINDS[kind]
    options = {"max_context_len": 192, "dtype": "float32"} | options
    model = make_wide_model(family) if draft else make_model(make_config(family))
    return Engine.from_pretrained(model, draft=draft, shape=shape, page_size=page_size, **options)


def hybrid_prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 90, 37).tolist()


def hybrid_cases():
    """Each family with each kind of draft; page sizes, depths and samplings take turns."""
    for i, family in enumerate(HYBRIDS):
        for j, kind in enumerate(("plain", "ngram", "eagle chain", "eagle tree")):
            for page_size in (1, 16):
                is_first = page_size == (1, 16)[(i + j) % 2]
                marks = () if is_first else (pytest.mark.full,)
                params, depth = (GREEDY, DRAWN)[(i + j // 2) % 2], (i + j) % 2
                name = f"{family}-{kind}-{page_size}"
                yield pytest.param(family, kind, page_size, params, depth, marks=marks, id=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "kind", "page_size", "params", "depth"), [*hybrid_cases()])
def test_a_row_moves_with_its_recurrent_state(family, kind, page_size, params, depth):
    """A session between two turns and in mid-turn, and a request in mid-text."""
    first, second, third = map(hybrid_prompt, range(3))
    with (
        hybrid(family, kind, page_size, overlap_depth=depth) as one,
        hybrid(family, kind, page_size, overlap_depth=depth) as two,
    ):
        with one.open_session() as stays:
            wanted = [stays.append(each, params).output().token_ids for each in (first, second)]
        (alone,) = one.generate([third], params)
        for engine in (one, two):
            engine.forget_prefixes()

        session = one.open_session()
        session.append(first, params).output()
        with one.export(session) as export:
            assert export.length >= len(first) - 1
            moved = two.import_row(export.image())
            export.arrived()
        there = []
        turn = moved.append(second, params)
        for _ in range(3):
            two.turn()
        with two.export(moved) as back:
            image = back.image()
            returned = one.import_row(image, on_item=lambda _, item: there.append(item))
            back.arrived()
        assert turn.output().finish_reason == "moved"
        assert back.length > export.length
        run(one)
        assert outputs(there)[-1].token_ids == wanted[1]
        if family != "mamba":  # which begins anew if many tokens are behind the state
            assert outputs(there)[-1].num_reused == back.length
        returned.close()

        told, there = [], []
        number = one.submit(third, params, on_item=lambda _, item: told.append(item))
        while len(told) < 4:
            one.turn()
        with one.export(number) as export:
            assert export.length >= len(third) - 1
            two.import_row(export.image(), on_item=lambda _, item: there.append(item))
            export.arrived()
        run(one)
        run(two)
        assert outputs(told)[-1].finish_reason == "moved"
        assert outputs(there)[-1].token_ids == alone.token_ids
        for engine in (one, two):
            engine.forget_prefixes()
            assert_no_page_leaked(engine.ledger)


@pytest.mark.parametrize("way", ["file", "tcp", "shared memory"])
def test_a_recurrent_state_goes_each_way(tmp_path, way):
    prompt, more = hybrid_prompt(0), hybrid_prompt(1)
    with hybrid("mamba2", "plain", 16) as one, hybrid("mamba2", "plain", 16) as two:
        with one.open_session() as stays:
            wanted = [stays.append(each, GREEDY).output().token_ids for each in (prompt, more)]
        session, arrived = one.open_session(), []
        session.append(prompt, GREEDY).output()
        with one.export(session) as export:
            send(export, two, way, tmp_path / "row", arrived.append)
        (moved,) = arrived
        output = moved.append(more, GREEDY).output()
        assert (output.token_ids, output.num_reused) == (wanted[1], export.length)
        moved.close()


def send(export, engine: Engine, way: str, path, on_arrival) -> None:
    take_in = engine.take_in(on_arrival)
    if way == "file":
        parcel.save(export, path)
        take_in(parcel.load(path, engine.layout))
        export.arrived()
    elif way == "shared memory":
        if not hasattr(os, "memfd_create"):
            pytest.skip("memfd is Linux's")
        with shared_memory.SharedMemoryReceiver(take_in, engine.layout, path):
            shared_memory.send(export, path)
    else:
        asyncio.run(send_by_tcp(export, tcp.TcpReceiver(take_in, engine.layout, key=KEY)))


async def send_by_tcp(export, receiver: tcp.TcpReceiver) -> None:
    await receiver.start()
    await tcp.send(export, "127.0.0.1", receiver.port, key=KEY)
    await receiver.close()


def test_a_state_that_does_not_arrive_gives_another_text(monkeypatch):
    """Without it the row goes on from what the slot has held: the texts above hang on it."""
    read = PageBytes.write
    monkeypatch.setattr(
        PageBytes,
        "write",
        lambda self, group, pages, data: (
            checksum(data) if group == len(self.page_bytes) - 1 else read(self, group, pages, data)
        ),
    )
    prompt, more = hybrid_prompt(0), hybrid_prompt(1)
    with hybrid("mamba2", "plain", 16) as one, hybrid("mamba2", "plain", 16) as two:
        with one.open_session() as stays:
            wanted = [stays.append(each, GREEDY).output().token_ids for each in (prompt, more)]
        session = one.open_session()
        session.append(prompt, GREEDY).output()
        with one.export(session) as export:
            moved = two.import_row(export.image())
            export.arrived()
        assert moved.append(more, GREEDY).output().token_ids != wanted[1]
        moved.close()


def test_rows_that_leave_hold_all_state_slots_but_one():
    """Law: others run while rows leave; a row that would hold the last slot leaves its KV."""
    options = {"max_batch": 2, "max_sessions": 0, "prefix_cache": False}
    prompts, told = [*map(hybrid_prompt, range(3))], []
    with hybrid("mamba2", "plain", 16, **options) as engine:
        wanted = [output.token_ids for output in engine.generate(prompts, GREEDY)]
        numbers = [
            engine.submit(prompt, GREEDY, on_item=lambda _, item: told.append(item))
            for prompt in prompts[:2]
        ]
        while len(told) < 4:
            engine.turn()
        exports = [engine.export(number) for number in numbers]
        assert [export.length > 0 for export in exports] == [True, False]
        (output,) = engine.generate(prompts[2:], GREEDY)
        assert output.token_ids == wanted[2]
        for export in exports:
            export.give_back()
        run(engine)
        assert sorted(output.token_ids for output in outputs(told)) == sorted(wanted[:2])
        assert_no_page_leaked(engine.ledger)


def test_engines_whose_states_differ_refuse_each_others_rows():
    with hybrid("mamba2", "plain", 16) as one:
        with one.open_session() as session:
            session.append(hybrid_prompt(0), GREEDY).output()
            with one.export(session) as export:
                image = export.image()
        for change in ({"state_bytes": 0}, {"state_bytes": one.layout.state_bytes + 4}):
            other = dataclasses.replace(one.layout, **change)
            with pytest.raises(TransferError, match="models, weights, dtype, drafter and page"):
                Image(image, other)


def test_a_full_engine_takes_the_text_alone():
    """No row is free: the KV is computed again when its turn comes."""
    with engine_of() as one, engine_of(max_batch=1, num_pages=70) as two:
        session = one.open_session()
        session.append(PROMPTS[0], GREEDY).output()
        image = None
        with one.export(session) as export:
            image = export.image()
        wanted = session.append(PROMPTS[1], GREEDY).output().token_ids
        told = []
        two.submit(PROMPTS[3] * 3, GREEDY, on_item=lambda number, item: told.append(item))
        two.turn()
        moved = two.import_row(image)
        run(two)
        assert moved.append(PROMPTS[1], GREEDY).output().token_ids == wanted
        moved.close()
        session.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_an_engine_decodes_on_while_a_row_arrives(monkeypatch, depth, params):
    """Its texts, and the text of the row, are as if each were alone."""
    monkeypatch.setattr(image_module, "RUN_BYTES", 4096)
    with engine_of() as one, engine_of(overlap_depth=depth) as two:
        (alone,) = two.generate([PROMPTS[3]], params)
        two.forget_prefixes()
        session = one.open_session()
        session.append(PROMPTS[0], params).output()
        with one.export(session) as export:
            image = export.image()
        wanted = session.append(PROMPTS[1], params).output().token_ids
        session.close()
        items, num_runs, found = [], [], []
        two.submit(PROMPTS[3], params, on_item=lambda number, item: items.append(item))

        def wait(num: int) -> None:
            num_runs.append(num)
            two.turn()

        two.take_in(found.append)(image, wait)
        assert num_runs == list(range(1, len(num_runs) + 1)) and len(num_runs) > 8
        assert len(items) > 3, "nothing was decoded between two runs"
        run(two)
        assert outputs(items)[-1].token_ids == alone.token_ids
        second = found[0].append(PROMPTS[1], params).output()
        assert second.token_ids == wanted
        assert second.num_reused >= export.length - 2
        found[0].close()
        two.forget_prefixes()
        assert_no_page_leaked(two.ledger)


@pytest.mark.parametrize("ends", ["a damaged run", "a lost sender", "Ctrl-C"])
def test_a_row_that_breaks_off_leaves_nothing_and_ends_no_other(monkeypatch, ends):
    monkeypatch.setattr(image_module, "RUN_BYTES", 4096)
    with engine_of() as one, engine_of() as two:
        (alone,) = two.generate([PROMPTS[3]], GREEDY)
        two.forget_prefixes()
        session = one.open_session()
        session.append(PROMPTS[0], GREEDY).output()
        with one.export(session) as export:
            image = export.image()
        items = []
        two.submit(PROMPTS[3], GREEDY, on_item=lambda number, item: items.append(item))
        two.turn()
        if ends == "a damaged run":
            image[-1] ^= 1
        errors = {"a lost sender": TransferError("it is gone"), "Ctrl-C": KeyboardInterrupt()}

        def wait(num: int) -> None:
            if num == 5 and ends in errors:
                raise errors[ends]

        with pytest.raises((TransferError, KeyboardInterrupt)):
            two.take_in(lambda found: None)(image, wait)
        assert not two.core.scheduler.conversations.open
        run(two)
        assert outputs(items)[-1].token_ids == alone.token_ids
        two.forget_prefixes()
        assert_no_page_leaked(two.ledger)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["session", "request"])
@pytest.mark.parametrize("loses", ["its pages to a request", "nothing to Ctrl-C elsewhere"])
def test_a_row_may_lose_its_place_while_it_arrives(monkeypatch, kind, loses):
    """A request that needs the pages takes them: then the row's text goes on without KV."""
    monkeypatch.setattr(image_module, "RUN_BYTES", 4096)
    with engine_of() as one, engine_of(num_pages=65, max_batch=2) as two:
        told, found = [], []
        if kind == "session":
            session = one.open_session()
            session.append(PROMPTS[0], GREEDY).output()
            with one.export(session) as export:
                image = export.image()
            wanted = session.append(PROMPTS[1], GREEDY).output().token_ids
            session.close()
        else:
            wanted = one.generate([PROMPTS[0]], GREEDY)[0].token_ids
            number = one.submit(PROMPTS[0], GREEDY, on_item=lambda _, item: told.append(item))
            while not told:
                one.turn()
            with one.export(number) as export:
                image = export.image()

        needy, others = (PROMPTS[3] * 4)[:220], []
        (alone,) = two.generate([needy], GREEDY)
        two.forget_prefixes()

        def wait(num: int) -> None:
            if num == 5 and loses.startswith("nothing"):
                two.core.scheduler.recover("Ctrl-C")
            elif num == 5:
                two.submit(needy, GREEDY, on_item=lambda _, item: others.append(item))
            if num in (5, 6):  # its prompt is computed; the other runs come while it decodes
                two.turn()
            if num == 7:
                memory.extend(content())

        def content() -> list[bytes]:
            of, read = two._moves._pages, []
            for g, size in enumerate(of.page_bytes):
                pages = np.arange(1, two.ledger.groups[g].num_pages + 1, dtype=np.int32)
                read.append(np.empty(len(pages) * size, np.uint8))
                of.read(g, pages, read[-1])
            return [each.tobytes() for each in read]

        memory: list[bytes] = []
        told.clear()
        take_in = two.take_in(found.append, on_item=lambda _, item: told.append(item))
        take_in(image, wait)
        assert (content() == memory) == loses.startswith("its pages"), "lost pages were written"
        while others and not outputs(others):
            two.turn()
        assert [other.token_ids for other in outputs(others)] == [alone.token_ids] * bool(others)
        assert bool(others) == loses.startswith("its pages")
        output = None
        if kind == "session":
            output = found[0].append(PROMPTS[1], GREEDY).output()
            found[0].close()
        else:
            run(two)
            output = outputs(told)[-1]
        assert output.token_ids == wanted
        is_kept = loses.startswith("nothing")
        assert (output.num_reused >= export.length - 2) == is_kept
        assert not two.core.scheduler.conversations.open
        two.forget_prefixes()
        assert_no_page_leaked(two.ledger)


def test_the_lengths_and_the_number_of_a_request_that_has_not_begun():
    with engine_of() as one, engine_of() as two:
        (wanted,) = one.generate([PROMPTS[5]], DRAWN)
        number = one.submit(PROMPTS[5], DRAWN)
        told = []
        with one.export(number) as export:
            assert export.length == 0
            two.import_row(export.image(), on_item=lambda number, item: told.append(item))
            export.arrived()
        run(one)
        run(two)
        assert told[-1].token_ids == wanted.token_ids


def test_the_drafter_of_the_image_is_the_engines():
    """Another drafter has other draft KV: the layouts differ."""
    with engine_of("plain") as one, engine_of("ngram") as two, engine_of() as three:
        keys = {engine.layout.key for engine in (one, two, three)}
        assert len(keys) == 3
