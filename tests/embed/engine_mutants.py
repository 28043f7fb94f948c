"""Mutants of an engine's classes: does the proof at load refuse them?

    PYTHONPATH=.engines/vllm:tests/embed:. .venv/bin/python tests/embed/engine_mutants.py vllm

A mutant changes an operator or a constant of a method, or drops a statement. Each is tried in a
child process: the proof as at load, then one ten times as long with other seeds. Prints the mutants
that the proof accepts, and whether the method is one that the plug-in keeps: then the engine's own
code serves with the plug-in and without it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import pkgutil
import random
import resource
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

#: For each engine the classes and functions that the plug-in takes the place of, or works around.
CLASSES = {
    "vllm": (
        "vllm.v1.core.block_pool:BlockPool",
        "vllm.v1.core.block_pool:BlockHashToBlockMap",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    ),
    "sglang": (
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator",
        "sglang.srt.mem_cache.allocator.token:TokenToKVPoolAllocator",
        "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator",
    ),
    "sglang-reserve": (
        "sglang.srt.mem_cache.allocation_sizing:page_aligned_decode_alloc_lens",
        "sglang.srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode",
        "sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode",
        "sglang.srt.managers.schedule_batch:ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        "sglang.srt.mem_cache.allocation:alloc_for_spec_decode",
        "sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode",
        "sglang.srt.speculative.eagle_utils:eagle_prepare_for_verify",
        "sglang.srt.speculative.eagle_worker_common:prepare_for_draft",
        "sglang.srt.speculative.eagle_worker_common:duplicate_prefix_tail_to_draft_branches",
    ),
    "sglang-rows": (
        "sglang.srt.mem_cache.memory_pool:ReqToTokenPool",
        "sglang.srt.mem_cache.allocation:alloc_for_extend",
        "sglang.srt.mem_cache.allocation:alloc_token_slots",
        "sglang.srt.mem_cache.common:release_kv_cache",
        "sglang.srt.mem_cache.common:_release_overallocated_kv_indices",
        "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.free_kv_row",
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.checkpoint_into_tree",
        "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache.prefix_device_indices",
        "sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode",
        "sglang.srt.managers.scheduler_components.batch_result_processor:"
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "sglang.srt.session.streaming_session:StreamingSession",
    ),
}
PROOFS = {
    "vllm": "specpool.plugins.vllm.pool_proof",
    "sglang": "specpool.plugins.sglang.pages_proof",
    "sglang-reserve": "specpool.plugins.sglang.reserve_proof",
    "sglang-rows": "specpool.plugins.sglang.rows_proof",
}
#: Ours, and what the plug-in leaves in its place: a method that they share is kept.
OURS = {
    "vllm": (
        "specpool.plugins.vllm.pool:SpecpoolBlockPool",
        "specpool.plugins.vllm.pool:SpecpoolBlock",
        "vllm.v1.core.block_pool:BlockHashToBlockMap",
    ),
    "sglang": (
        "specpool.plugins.sglang.allocator:SpecpoolPagedAllocator",
        "specpool.plugins.sglang.allocator:SpecpoolTokenAllocator",
    ),
    "sglang-reserve": (),
    "sglang-rows": (),
}
#: CPU seconds of a child in the proof at load, and in the longer one: what else the machine does
#: must not end it.
LOAD_SECONDS, SECONDS = 30, 120
NO_END = "no end in time"
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


class Mutant(NamedTuple):
    """The number-th place of a method where something can be changed."""

    target: str  # module:Class.method
    number: int
    text: str


def methods(engine: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield an engine's functions, and the methods that its classes define themselves."""
    for target in CLASSES[engine]:
        member, name = pkgutil.resolve_name(target), target.partition(":")[2]
        if inspect.isfunction(member):
            yield target, member
            continue
        for attribute, value in vars(member).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if inspect.isfunction(function) and function.__qualname__ == f"{name}.{attribute}":
                with contextlib.suppress(OSError):
                    if inspect.getsource(function).lstrip().startswith(("def", "@")):
                        yield f"{target}.{attribute}", function


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """Return a method's syntax tree with the line numbers of its file."""
    lines, first = inspect.getsourcelines(function)
    (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(tree, ast.FunctionDef)
    ast.increment_lineno(tree, first - 1)
    return tree


def changes(tree: ast.FunctionDef) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what can be changed in a tree: a line that says it, and the function that does it."""
    for node in list(ast.walk(tree)):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for index, child in enumerate(body if isinstance(body, list) else []):
                if _can_be_dropped(child):
                    text = f"line {child.lineno}: drop {_one_line(child)}"
                    yield text, _setter(body, index, ast.copy_location(ast.Pass(), child))
        if _is_text(node):
            continue
        where = f"line {getattr(node, 'lineno', tree.lineno)}: "
        if isinstance(node, ast.Compare):
            for index, operator in enumerate(node.ops):
                if type(operator) in COMPARE:
                    new = COMPARE[type(operator)]()
                    text = f"{where}{_one_line(node)} by {type(new).__name__}"
                    yield text, _setter(node.ops, index, new)
        elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in BINARY:
            operator_new = BINARY[type(node.op)]()
            text = f"{where}{_one_line(node)} by {type(operator_new).__name__}"
            yield text, _attribute_setter(node, "op", operator_new)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            text = f"{where}{_one_line(node)} by {type(other).__name__}"
            yield text, _attribute_setter(node, "op", other)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield f"{where}{node.value} to {value}", _attribute_setter(node, "value", value)
        elif isinstance(node, ast.If | ast.While):
            negated = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
            yield f"{where}not ({_one_line(node.test)})", _attribute_setter(node, "test", negated)


def _can_be_dropped(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and not _one_line(node).startswith("logger.")
    return isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.Continue)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _one_line(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:90]


def _setter(items: Any, index: int, value: Any) -> Callable[[], None]:
    return lambda: items.__setitem__(index, value)


def _attribute_setter(node: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def all_mutants(engine: str) -> list[Mutant]:
    """Return every mutant of an engine's classes, asserts and defaults left out."""
    return [
        Mutant(target, number, text)
        for target, function in methods(engine)
        for number, (text, _) in enumerate(changes(tree_of(function)))
    ]


def apply(engine: str, mutant: Mutant) -> None:
    """Change the method in this process, wherever it is referred to."""
    function = dict(methods(engine))[mutant.target]
    tree = copy.deepcopy(tree_of(function))
    _, change = list(changes(tree))[mutant.number]
    change()
    tree.decorator_list = []
    shell = ast.ClassDef(
        name=function.__qualname__.split(".")[0],
        bases=[],
        keywords=[],
        body=[tree],
        decorator_list=[],
        type_params=[],
    )
    ast.copy_location(shell, tree)
    module = ast.fix_missing_locations(ast.Module([shell], []))
    flags = function.__code__.co_flags & 0x1000000  # from __future__ import annotations
    code = compile(module, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    (body,) = (const for const in code.co_consts if isinstance(const, CodeType))
    new = next(
        const
        for const in body.co_consts
        if isinstance(const, CodeType) and const.co_name == function.__name__
    )
    if new.co_freevars != function.__code__.co_freevars:
        raise ValueError(f"{mutant.target}: a mutant refers to {new.co_freevars}")
    function.__code__ = new


def is_kept(engine: str, target: str) -> bool:
    """Return whether the engine's own method serves with our plug-in, too."""
    name = target.rpartition(".")[2]
    function = dict(methods(engine))[target]
    for ours in OURS[engine]:
        value = inspect.getattr_static(pkgutil.resolve_name(ours), name, None)
        if function in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            return True
    return False


def verdict(engine: str, mutant: Mutant) -> dict[str, Any]:
    """Try a mutant in a child; return what the proof says, and one ten times as long."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.setitimer(signal.ITIMER_PROF, LOAD_SECONDS)
            resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
            apply(engine, mutant)
            proof: Any = importlib.import_module(PROOFS[engine])
            line = proof.difference()
            os.write(writer, f"{json.dumps(line)}\n".encode())
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            os.write(writer, json.dumps(None if line else proof.longer_difference()).encode())
        except BaseException as error:
            os.write(writer, f"{json.dumps(f'{type(error).__name__}: {error}')}\nnull".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    ends = [json.loads(part) for part in said.splitlines()]
    line, longer = [*ends, NO_END, NO_END][:2]
    kept = is_kept(engine, mutant.target)
    return {**mutant._asdict(), "kept": kept, "proof": line, "ten times as long": longer}


def record(engine: str, num_mutants: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts, and the mutants that the proof at load accepts."""
    accepted = [result for result in results if result["proof"] is None]
    late = sum(result["ten times as long"] not in (None, NO_END) for result in accepted)
    return {
        "engine": engine,
        "mutants": num_mutants,
        "tried": len(results),
        "told apart": late,
        "accepted": accepted,
    }


def main() -> None:
    """Try the mutants, and print those that are accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted(CLASSES))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="how many of the first ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    importlib.import_module(PROOFS[asked.engine])
    mutants = all_mutants(asked.engine)
    chosen = random.Random(asked.seed).sample(mutants, min(asked.count, len(mutants)))
    chosen = chosen[asked.skip :]
    results = []
    workers = multiprocessing.get_context("fork").Pool(asked.jobs)
    for result in workers.imap_unordered(functools.partial(verdict, asked.engine), chosen):
        mutant = Mutant(*(result[name] for name in Mutant._fields))
        results.append(result)
        if result["proof"] is None:
            longer = result["ten times as long"]
            place = "a method that is kept" if result["kept"] else "a method that ours replaces"
            print(f"accepted, {place}: {mutant.target}, {mutant.text}; then: {longer}", flush=True)
        if asked.write:
            text = json.dumps(record(asked.engine, len(mutants), results), indent=1)
            asked.write.write_text(text + "\n", "utf-8")
    counts = record(asked.engine, len(mutants), results)
    print(
        f"{counts['tried']} of {counts['mutants']} mutants of {asked.engine}: "
        f"{len(counts['accepted'])} accepted, {counts['told apart']} of them told apart by a proof "
        "ten times as long"
    )


if __name__ == "__main__":
    main()
