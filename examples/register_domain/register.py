"""Registers a domain on a running server and shows what its drafts earn.

polydraft serve configs/demo.yaml &
python examples/register_domain/register.py --url http://127.0.0.1:8321
"""

from __future__ import annotations

import argparse

import httpx
from openai import OpenAI

EXAMPLES = [
    "How do I make pancakes without eggs?",
    "What goes into a minestrone?",
    "How long does a 2 kg chicken roast?",
    "Give me a recipe for banana bread.",
    "Which flour do I take for pizza dough?",
]
QUESTIONS = [
    "How do I make a simple tomato soup?",
    "How do I make a simple pumpkin soup?",
    "How do I make waffles without eggs?",
]


def main() -> None:
    """Register, ask, and print what the domain's drafts earned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8321")
    url = parser.parse_args().url

    domain = {"name": "recipes", "description": "cooking and baking at home", "examples": EXAMPLES}
    httpx.post(f"{url}/v1/domains", json=domain, timeout=30).raise_for_status()

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            model="polydraft",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=120,
        )
        extra = (answer.model_extra or {})["polydraft"]
        print(f"{extra['domain']:12} {extra['mean_accepted_length']:.2f} tokens a target pass   {question}")

    for row in httpx.get(f"{url}/v1/domains", timeout=30).json()["data"]:
        print(
            f"{row['name']:12} requests {row.get('requests', 0):4}  "
            f"acceptance {row.get('acceptance_rate', 0):.2f}"
        )


if __name__ == "__main__":
    main()
