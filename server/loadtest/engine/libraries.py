"""Other engines as processes of the benchmark: `python libraries.py LIBRARY MODEL JSON`.

It needs nothing but Python and the library, so any interpreter that has the library can run it.
What is said on its standard input and output is told in process.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

THREADS = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
SHOWN = 24  # tokens of the first answer
Prompts = list[list[int]]
Answer = tuple[list[float], list[int]]


class Transformers:
    """Hugging Face's `generate`, with its own cache or without. Options: dtype, device."""

    uncached = True

    def __init__(self, model: str, dtype: str = "float32", device: str = "cpu") -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(THREADS)
        self.torch, self.device = torch, device
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        )
        self.model = loaded.to(device).eval()
        self.model.generation_config.eos_token_id = None  # nothing ends a text
        self.model.generation_config.pad_token_id = 0
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def generate(self, prompts: Prompts, new: int, use_cache: bool) -> Answer:
        clock = Clock()
        ids = self.torch.tensor(prompts, device=self.device)
        with self.torch.inference_mode():
            clock.start(skip=1)  # it begins with the prompts
            made = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                use_cache=use_cache,
                streamer=clock,
            )
        return clock.times, made[0, len(prompts[0]) :].tolist()


class CTranslate2:
    """CTranslate2's `generate_batch`. Options: dtype, one of its compute types."""

    uncached = False

    def __init__(self, model: str, dtype: str = "float32", device: str = "cpu") -> None:
        ctranslate2 = import_module("ctranslate2")
        self.generator = ctranslate2.Generator(
            model, device=device, compute_type=dtype, inter_threads=1, intra_threads=THREADS
        )
        self.words = json.loads((Path(model) / "vocabulary.json").read_text())
        self.version = f"ctranslate2 {ctranslate2.__version__}, {self.generator.compute_type}"

    def generate(self, prompts: Prompts, new: int, use_cache: bool) -> Answer:
        last: dict[int, float] = {}  # when the slowest text had its token of each step
        words = [[self.words[token] for token in prompt] for prompt in prompts]
        clock = Clock()

        def note(result: Any) -> bool:  # noqa: ANN401  # the library's own
            last[result.step] = clock.seconds
            return False

        clock.start()
        results = self.generator.generate_batch(
            words,
            max_length=new,
            min_length=new,  # nothing ends a text
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note,
        )
        return [last[step] for step in sorted(last)], list(results[0].sequences_ids[0])


class OpenVINO:
    """OpenVINO GenAI: its pipeline for one text, continuous batching for several. Options: dtype,
    the precision to compute in (float32, bfloat16 or its own words).
    """

    uncached = False

    def __init__(self, model: str, dtype: str = "float32", device: str = "cpu") -> None:
        self.numpy, self.openvino = import_module("numpy"), import_module("openvino")
        self.genai: Any = import_module("openvino_genai")
        precision = {"float32": "f32", "bfloat16": "bf16"}.get(dtype, dtype)
        self.properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": THREADS,
        }
        self.path, self.device = model, device.upper()
        self.single = self.genai.LLMPipeline(model, self.device, **self.properties)
        self.batched: Any = None
        self.version = f"openvino-genai {self.genai.__version__}"

    def generate(self, prompts: Prompts, new: int, use_cache: bool) -> Answer:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        inputs = [self.openvino.Tensor(self.numpy.array([p], dtype="int64")) for p in prompts]
        clock = Clock()
        if len(prompts) > 1:
            return self._together(inputs, config, new)

        def write(_: object, token: object) -> object:
            for _ in token if isinstance(token, list) else (token,):
                clock.put()
            return self.genai.StreamingStatus.RUNNING

        methods = {"write": write, "end": lambda _: None}
        streamer = type("Streamer", (self.genai.StreamerBase,), methods)()
        clock.start()
        result = self.single.generate(inputs[0], config, streamer)
        return clock.times, list(result.tokens[0])[-new:]

    def _together(self, inputs: list[Any], config: object, new: int) -> Answer:
        if self.batched is None:
            plan = self.genai.SchedulerConfig()
            plan.cache_size = 4  # GB
            plan.max_num_seqs, plan.max_num_batched_tokens = 256, 4096
            plan.enable_prefix_caching = False
            self.batched = self.genai.ContinuousBatchingPipeline(
                self.path, plan, self.device, self.properties
            )
        clock = Clock()
        clock.start()
        open_ = [self.batched.add_request(i, ids, config) for i, ids in enumerate(inputs)]
        made: list[list[int]] = [[] for _ in open_]
        while len(clock.times) < new and self.batched.has_non_finished_requests():
            self.batched.step()
            for handle, tokens in zip(open_, made, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += output.generated_ids
            while len(clock.times) < min(map(len, made)):
                clock.put()
        while self.batched.has_non_finished_requests():
            self.batched.step()
        return clock.times, made[0]


class Clock:
    """Notes when it is called; transformers calls it a streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, skip: int = 0) -> None:
        self.began, self.skip = time.perf_counter(), skip

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def put(self, value: object = None) -> None:
        if self.skip:
            self.skip -= 1
        else:
            self.times.append(self.seconds)

    def end(self) -> None:
        pass


LIBRARIES = {"transformers": Transformers, "ctranslate2": CTranslate2, "openvino": OpenVINO}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    name, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    began = time.perf_counter()
    try:
        library: Any = LIBRARIES[name](model, **options)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    ready = {"ready": library.version, "load_s": time.perf_counter() - began}
    print(json.dumps({**ready, "uncached": library.uncached}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            times, tokens = library.generate(
                command["prompts"], command["new"], command.get("use_cache", True)
            )
            answer: dict[str, Any] = {"ts": times, "toks": tokens[:SHOWN]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
