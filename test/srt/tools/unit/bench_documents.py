"""Reports of `pd-radix bench` for tests: two runs of each side, which took turns both ways round."""

from __future__ import annotations

from sglang_pd_radix.tools.bench import report


def run_entry(variant, number, requests_per_s, sent):
    figures = {f.key: 1.0 for f in report.FIGURES}
    figures |= {
        "requests_per_s": requests_per_s,
        "sent_bytes": sent,
        "prompt_pages": 10,
        "least_pages": 4,
    }
    rounds = [
        {
            "requests": 6,
            "duration_s": 3.0 / requests_per_s if n else 6.0,
            "ttft_p50_s": 1.0 / requests_per_s,
            "prompt_tokens": 30,
            "reused_tokens": 16,
            "sent_bytes": sent / 2,
            "least_pages": 2,
            "prompt_pages": 5,
        }
        for n in range(2)
    ]
    return {
        "variant": variant,
        "radix": variant.startswith("on"),
        "number": number,
        "turn": (number + (variant == "off")) % 2 + 1,
        "figures": figures,
        "rounds": rounds,
        "answers_sha256": "0",
        "different_answers": 0,
    }


def a_document(chat=False, **changes):
    runs = [run_entry("off", 1, 2, 1000), run_entry("on", 1, 3, 400), run_entry("off", 2, 4, 1000)]
    runs.append(run_entry("on", 2, 8, 440))
    entry = {
        "key": "a",
        "title": "x < y & z",
        "sizes": {"pool": 64},
        "requests": 3,
        "chat": chat,
        "notes": [],
        "page_size": 16,
        "variants": ["off", "on"],
        "sides": {"off": {"options": [], "env": {}}, "on": {"options": [], "env": {}}},
        "problems": [],
        "differences": [],
        "runs": runs,
        **changes,
    }
    report.finish(entry)
    names = ("date", "machine", "sglang", "sglang_pd_radix", "torch", "router", "backend", "backend_version")
    setting = {name: name for name in (*names, "python", "model", "dtype", "device", "command")}
    return {"setting": {**setting, "page_size": 16, "runs": 2}, "workloads": [entry]}
