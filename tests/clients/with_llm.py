"""llm: chats, completions, streams, a conversation; by its command line and in Python."""

# /// script
# dependencies = ["llm==0.36"]
# ///

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from expected import KEY, MODEL, URL, chat, greedy, ids

MODELS = f"""
- model_id: forge
  model_name: {MODEL}
  api_base: {URL}/v1
  api_key_name: forge
- model_id: forge-completion
  model_name: {MODEL}
  api_base: {URL}/v1
  api_key_name: forge
  completion: true
"""
PROMPT = "Say more now"
OPTIONS = {"temperature": 0, "max_tokens": 24}


def command(*words: str) -> str:
    """Return what `llm words...` prints."""
    given = [word for name, value in OPTIONS.items() for word in ("-o", name, str(value))]
    options = given if "-m" in words else []
    run = subprocess.run(
        [sys.executable, "-m", "llm", *words, *options], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def check_commands() -> None:
    listed = command("models")
    assert "forge" in listed and "forge-completion" in listed, listed
    for model, prompt in (("forge", chat(("user", PROMPT))), ("forge-completion", PROMPT)):
        known = greedy(prompt, 24)
        for words in ((), ("--no-stream",)):
            printed = command("-m", model, PROMPT, *words)
            assert printed == known.text + "\n", (model, words, printed)
    # A conversation continues the earlier messages, and the log has the usage of each answer.
    command("-m", "forge", PROMPT)
    command("-m", "forge", "-c", "And then?")
    rendered = chat(
        ("user", PROMPT),
        ("assistant", greedy(chat(("user", PROMPT)), 24).text),
        ("user", "And then?"),
    )
    # llm itself keeps no usage of completions.
    (last,) = json.loads(command("logs", "list", "-n", "1", "--json"))
    known = greedy(rendered, 24)
    assert last["response"] == known.text, last
    assert (last["input_tokens"], last["output_tokens"]) == (len(ids(rendered)), known.tokens), last


def check_streams() -> None:
    import llm

    for name, prompt in (("forge", chat(("user", PROMPT))), ("forge-completion", PROMPT)):
        known = greedy(prompt, 24)
        model = llm.get_model(name)
        parts = list(model.prompt(PROMPT, stream=True, **OPTIONS))
        assert "".join(parts) == known.text, (name, parts)
        assert sum(map(bool, parts)) > 2, f"not a stream: {parts}"
        whole = model.prompt(PROMPT, stream=False, **OPTIONS)
        assert whole.text() == known.text, (name, whole.text())


def main() -> None:
    folder = Path("llm")
    folder.mkdir()
    (folder / "extra-openai-models.yaml").write_text(MODELS, "utf-8")
    (folder / "keys.json").write_text(json.dumps({"forge": KEY}), "utf-8")
    os.environ["LLM_USER_PATH"] = str(folder.resolve())
    check_commands()
    check_streams()
    print("command and Python: chats and completions, streamed and whole; a conversation; usage")


if __name__ == "__main__":
    main()
