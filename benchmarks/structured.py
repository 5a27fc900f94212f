"""JSON answers under a schema: do they all validate, and what do masks cost?

    python benchmarks/structured.py [--rounds 5] [--dtype bfloat16] [--temperature 0.7]

SmolLM2 answers 50 questions at once, each under a JSON schema of its own. Every answer must parse and validate (``valid`` of
``answers``). Then the same answers are timed, with grammars compiled and prompts cached, against the same questions without
grammars, each for as many tokens as its JSON has: ``ratio`` is constrained over free tokens per second, the median of
``--rounds`` rounds that take turns, to be at least 0.85. ``first_ratio`` is that of the first time, with prompts to compute,
grammars to compile and the vocabulary to read. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jsonschema

from pegboard import LLM, RequestOutput, SamplingParams, StructuredOutputs

SUBJECTS = ("person", "book", "city", "recipe", "film", "animal", "product", "concert", "company", "planet")


def text(length: int = 24) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": length}


def number(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def some(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def schemas(subject: str, place: int) -> list[dict[str, Any]]:
    """Five kinds of schema, with names and limits that differ by subject."""
    name = f"{subject}_name"
    sizes = {"enum": ["small", "medium", "large", f"{subject}-sized"]}
    optional = record(**{name: text(), "note": text(40), "rank": number(1, 10 + place)})
    optional["required"] = [name]
    leaves = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}
    definitions = {"part": record(label=text(10 + place), parts=leaves), "leaf": record(label=text(12))}
    return [
        record(**{name: text(20 + place), "year": number(1000, 2100), "size": sizes, "known": {"type": "boolean"}}),
        record(**{subject: record(**{name: text(), "tags": some(text(12), 3)}), "score": number(0, 100 + place)}),
        some(record(**{name: text(16 + place), "count": number(0, 99)}), 3),
        {"anyOf": [optional, record(unknown={"const": f"no {subject}"})]},
        {"$defs": definitions, "$ref": "#/$defs/part"},
    ]


def jobs() -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    """50 conversations and their schemas."""
    found = []
    for place, subject in enumerate(SUBJECTS):
        for schema in schemas(subject, place):
            question = f"Describe a {subject} in JSON. The schema is: {json.dumps(schema)}"
            found.append(([{"role": "user", "content": question}], schema))
    return found


def is_valid(output: RequestOutput, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(output.outputs[0].text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"not valid: {output.outputs[0].text!r} ({output.outputs[0].finish_reason}): {error}", file=sys.stderr)
        return False
    return True


def timed(llm: LLM, conversations: Sequence[Any], params: Sequence[SamplingParams]) -> tuple[list[RequestOutput], float]:
    """The outputs, and generated tokens per second."""
    began = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return outputs, sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    conversations, wanted = zip(*jobs(), strict=True)

    def params(i: int, **more: Any) -> SamplingParams:
        return SamplingParams(temperature=args.temperature, seed=i, **more)

    constrained = [params(i, max_tokens=700, structured_outputs=StructuredOutputs(json=s)) for i, s in enumerate(wanted)]
    with LLM("smollm2", dtype=args.dtype) as llm:
        llm.chat(conversations[:1], params(0, max_tokens=4), use_tqdm=False)
        outputs, first = timed(llm, conversations, constrained)
        valid = sum(map(is_valid, outputs, wanted))
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        free = [params(i, max_tokens=length, ignore_eos=True) for i, length in enumerate(lengths)]
        llm.reset_prefix_cache()
        first_free = timed(llm, conversations, free)[1]
        rounds = [(timed(llm, conversations, constrained)[1], timed(llm, conversations, free)[1]) for _ in range(args.rounds)]
    result = {
        "benchmark": "structured",
        "dtype": args.dtype,
        "answers": len(outputs),
        "valid": valid,
        "tokens": sum(lengths),
        "constrained_tokens_per_s": round(statistics.median(speed for speed, _ in rounds), 1),
        "free_tokens_per_s": round(statistics.median(speed for _, speed in rounds), 1),
        "ratio": round(statistics.median(bound / unbound for bound, unbound in rounds), 3),
        "first_ratio": round(first / first_free, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
