"""`Counters`: what the front measures of requests, in the names that vLLM's users read."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from specpool.serve.bridge.messages import Done

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Counters:
    """Counters and histograms of the front; their registry is scraped at `/metrics`.

    They count what clients have sent and got, as vLLM's do: new tokens as they come, and a prompt
    with all its tokens, cached or not, once for each sample, with the sample's first token.
    """

    def __init__(self, model_name: str) -> None:
        """Start at 0."""
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self._first_token = self._seconds(
            "time_to_first_token_seconds", "Arrival to the first token"
        )
        self._per_token = self._seconds(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens but the first"
        )
        self._between = self._seconds(
            "inter_token_latency_seconds", "Time between two parts of a stream, by token"
        )
        self._whole = self._seconds("e2e_request_latency_seconds", "Arrival to the end")
        self._queue = self._seconds("request_queue_time_seconds", "Arrival to the first row")
        self._prompt = self._tokens("request_prompt_tokens", "Prompt tokens of a request")
        self._new = self._tokens("request_generation_tokens", "New tokens of a request")
        self._prompt_total = self._counter(
            "prompt_tokens", "Prompt tokens of the texts that have begun, cached ones included."
        )
        self._new_total = self._counter("generation_tokens", "New tokens of all texts.")
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*self.labels, "finished_reason"],
            registry=self.registry,
        )
        self.answers = Counter(
            "specpool_http_requests",
            "Answers, by path and status.",
            ["path", "status"],
            registry=self.registry,
        )

    def first(self, seconds: float, num_prompt: int) -> None:
        """Note the first token of a sample, whose prompt has `num_prompt` tokens."""
        self._first_token.observe(seconds)
        self._prompt_total.inc(num_prompt)

    def new(self, num_tokens: int) -> None:
        """Note new tokens of a sample."""
        self._new_total.inc(num_tokens)

    def part(self, seconds: float, num_tokens: int) -> None:
        """Note a further part of a stream, which has `num_tokens` tokens."""
        if num_tokens:
            self._between.observe(seconds / num_tokens)

    def end(self, done: Done, seconds: float, first: float | None) -> None:
        """Note a sample that has ended, and the seconds since its arrival."""
        num_new = len(done.token_ids)
        self._ended.labels(**self.labels, finished_reason=done.finish_reason).inc()
        if done.finish_reason not in ("stop", "length"):
            return
        self._whole.observe(seconds)
        self._prompt.observe(done.num_prompt)
        self._new.observe(num_new)
        if done.queue_seconds is not None:
            self._queue.observe(done.queue_seconds)
        if first is not None and num_new > 1:
            self._per_token.observe((seconds - first) / (num_new - 1))

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, [*self.labels], registry=self.registry)
        return family.labels(**self.labels)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, f"{text}, in seconds.", _SECONDS)

    def _tokens(self, name: str, text: str) -> Histogram:
        return self._histogram(name, f"{text}.", _TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"vllm:{name}", text, [*self.labels], registry=self.registry, buckets=buckets
        )
        return family.labels(**self.labels)
