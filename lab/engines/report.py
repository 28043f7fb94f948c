"""`write_report`: a shrunk case as a page for a maintainer, a file to replay, and a script.

The page says what was run, what broke and what was not shown. The script needs the engine and no
package of ours; it is run once on the release, and the page says whether it shows the fault there.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from lab.engines.case import Case
from lab.engines.device import Finding
from lab.engines.laws import LAWS
from lab.engines.releases import ROOT
from lab.engines.vllm_home import least_blocks

_SCRIPT = Path(__file__).with_name("vllm_script.py")
#: Verbs that the script plays.
_SCRIPTED = {"send", "abort", "reset"}
#: What must hold by each law: those of `laws`, and those that are seen when something happens.
LAW_TEXTS = {law.name: law.rule for law in LAWS} | {
    "one owner": "a block that is handed out is held by nobody, and only holders free it",
    "content": "a position of a text reads the KV of that text up to there",
    "states": "a step goes on from the recurrent state of exactly the tokens before it",
    "admission": "what is admitted can be allocated",
    "order": "nothing that a launched step uses is given to a writer that does not wait for it",
    "usefulness": "the same prompt twice, alone in the engine, hits the cache",
    "exception": "no legal call ends the engine",
}


def write_report(out: Path, release: str, case: Case, finding: Finding) -> Path:
    """Write the folder of a finding below `out`, and return it."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{finding.law} {finding.where}".lower()).strip("-")
    folder = out / f"{release}-{slug}"
    folder.mkdir(parents=True, exist_ok=True)
    case.write(folder / "case.json")
    has_script = case.engine == "vllm" and not case.settings["connector"]
    has_script &= {verb.name for verb in case.verbs} <= _SCRIPTED
    has_script &= case.settings.get("stages", 1) == 1
    has_script &= not case.settings.get("images") and not case.settings.get("adapters")
    has_script &= all(group["kind"] != "states" for group in case.settings.get("groups", ()))
    if has_script:
        (folder / "replay.py").write_text(_script(case, finding), encoding="utf-8")
    (folder / "report.md").write_text(_page(release, case, finding, has_script), encoding="utf-8")
    return folder


def flags(case: Case) -> list[str]:
    """Return the settings of a case as the flags of the engine's server."""
    settings = case.settings
    if case.engine == "sglang":
        return _sglang_flags(settings)
    shown = [
        f"--max-model-len {settings['most_len']}",
        f"--max-num-seqs {settings['rows']}",
        f"--max-num-batched-tokens {settings['budget']}",
        f"--scheduling-policy {settings['policy']}",
        f"--num-gpu-blocks-override {least_blocks(settings) + settings['spare']}",
        "--async-scheduling" if settings["asynchronous"] else "--no-async-scheduling",
        "--enable-prefix-caching" if settings["caching"] else "--no-enable-prefix-caching",
    ]
    if settings.get("stages", 1) > 1:
        shown.append(f"--pipeline-parallel-size {settings['stages']}")
    if settings.get("watermark"):
        shown.append(f"--watermark {settings['watermark']}")
    if settings.get("interval", 1) > 1:
        shown.append(f"--prefill-schedule-interval {settings['interval']}")
    if not settings.get("whole", True):
        shown.append("--no-scheduler-reserve-full-isl")
    if settings.get("images"):
        shown.append(f"with an encoder cache of {settings['images']['cache']} tokens")
        if settings["images"]["whole"]:
            shown.append("--disable-chunked-mm-input")
    if settings.get("adapters"):
        shown.append(f"--enable-lora --max-loras {settings['adapters']}")
    if settings["long_prefill"]:
        shown.append(f"--long-prefill-token-threshold {settings['long_prefill']}")
    if settings["drafter"]:
        drafting = {"method": settings["drafter"], "num_speculative_tokens": settings["drafts"]}
        shown.append(f"--speculative-config '{json.dumps(drafting)}'")
    if "host_blocks" in (settings["connector"] or {}):
        shown.append("--kv-transfer-config with OffloadingConnector")
    elif settings["connector"]:
        shown.append("--kv-transfer-config with a connector that loads prefixes")
    return shown


def _sglang_flags(settings: dict[str, Any]) -> list[str]:
    shown = [
        f"--page-size {settings['page']}",
        f"--max-total-tokens {settings['num_tokens']}",
        f"--max-running-requests {settings['rows']}",
        f"--chunked-prefill-size {settings['chunk'] or -1}",
        f"--schedule-conservativeness {settings['conservativeness']}",
    ]
    if not settings["overlap"]:
        shown.append("--disable-overlap-schedule")
    if "spare_states" in settings:
        shown.append(f"--max-mamba-cache-size {3 * settings['rows'] + settings['spare_states']}")
    if "rows_to_come" in settings:
        shown.append("--disaggregation-mode decode")
        shown.append(f"--num-reserved-decode-tokens {settings['reserved']}")
    if settings.get("window"):
        shown.append(f"with a window of {settings['window']}, {settings['window_tokens']} slots")
    if settings.get("states"):
        shown.append(
            f"--max-mamba-cache-size {settings['states']} "
            f"--mamba-radix-cache-strategy {settings['strategy']} "
            f"--mamba-track-interval {settings['interval']} "
            f"--mamba-max-states-per-path {settings['most_states']}"
        )
        shown.append(f"with recurrent layers of chunks of {settings['grain']} tokens")
    if settings["sessions"]:
        shown.append("--enable-streaming-session")
    if settings.get("queue"):
        shown.append(f"--max-queued-requests {settings['queue']}")
    if priorities := settings.get("priorities"):
        shown.append("--enable-priority-scheduling")
        if priorities["low_first"]:
            shown.append("--schedule-low-priority-values-first")
        threshold = priorities["threshold"]
        shown.append(f"--priority-scheduling-preemption-threshold {threshold}")
    if settings["shape"]:
        num_steps, topk, num_draft_tokens = settings["shape"]
        shown.append(
            f"--speculative-algorithm EAGLE --speculative-num-steps {num_steps} "
            f"--speculative-eagle-topk {topk} --speculative-num-draft-tokens {num_draft_tokens}"
        )
    return shown


def _page(release: str, case: Case, finding: Finding, has_script: bool) -> str:
    engine, _, version = release.partition("-")
    groups = "".join(
        f"{group['kind']} attention with blocks of {group['block']}"
        + (f" and a window of {group['window']}" if "window" in group else "")
        + "; "
        for group in case.settings.get("groups", ())
    )
    late = case.settings.get("is_late", False)
    events = "\n".join(f"{number}. {verb}" for number, verb in enumerate(case.verbs, 1))
    script = (
        "`replay.py` plays the same events on the engine's own scheduler with a fake worker."
        if has_script
        else "There is no script: it plays neither every verb nor states nor SGLang."
    )
    return f"""# {engine} {version}: {finding.law}, at {finding.where}

**Law:** {LAW_TEXTS[finding.law]}.

**Seen:** {finding.text.replace(f"{ROOT}/", "")}

**Settings:** {groups}`{" ".join(flags(case))}`; a step runs {
        "as late as it can" if late else "when it is launched"
    }.

**Events** (a request shares `shared` tokens with those of its stem; then its own follow):

{events or "1. The same prompt is sent twice to an idle engine."}

**To repeat:** {script} `case.json` is for `python -m lab engines replay case.json --release {
        release
    }`.

**Not shown:** nothing was run on a GPU, and the model, the attention kernels and the workers are
stand-ins. Whether a newer release has it, and which threads are about it, is for the reader to add.
"""


def _script(case: Case, finding: Finding) -> str:
    data = dataclasses.asdict(case)
    data["num_blocks"] = least_blocks(case.settings) + case.settings["spare"]
    data["twice"] = case.settings["most_len"] - 5 if finding.law == "usefulness" else 0
    text = _SCRIPT.read_text(encoding="utf-8")
    return text.replace('json.loads("""{}""")', f'json.loads("""{json.dumps(data)}""")')
