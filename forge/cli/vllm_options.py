"""Options of vLLM's server that forge does not have, and what to do instead.

Owns the table, which docs/Command-line.md has too. An unknown option is refused with its remedy, if
it is here, and otherwise with the nearest option. The nearest in spelling is rarely the one meant:
--torch-compile is the nearest of --chat-template.

    --chat-template, chat_template ──► "Write it to chat_template.jinja in ..."
    --no-enable-lora               ──► "Leave it out: it is off"
"""

from __future__ import annotations

VLLM_OPTIONS: dict[tuple[str, ...], str] = {
    ("--model",): "Give the model without a flag, as MODEL",
    ("-tp",): "Give --tensor-parallel-size",
    ("--chat-template",): "Write it to chat_template.jinja in the model's folder",
    ("--default-chat-template-kwargs",): "Send chat_template_kwargs with each request",
    ("--tokenizer", "--tokenizer-mode", "--tokenizer-revision"): (
        "Put the tokenizer's files into the model's folder"
    ),
    ("--trust-remote-code",): (
        "No code of a checkpoint is run. Leave it out for a model that transformers has"
    ),
    ("--revision", "--code-revision"): "Download that revision and serve its folder",
    ("--download-dir",): "Set HF_HOME in the environment",
    ("--hf-token",): "Set HF_TOKEN in the environment",
    ("--hf-overrides", "--hf-config-path", "--rope-scaling", "--rope-theta"): (
        "Change config.json in the model's folder"
    ),
    ("--override-generation-config",): (
        "Write the parameters to generation_config.json of a folder, and give --generation-config"
    ),
    ("--quantization", "-q", "--kv-cache-dtype", "--calculate-kv-scales"): (
        "Serve weights and cache in bfloat16 or float16: there is no quantisation"
    ),
    ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"): (
        "Merge the adapter into the weights: there is no LoRA"
    ),
    ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--mm-processor-cache-gb"): (
        "Leave it out: there are no images and no sound"
    ),
    ("--runner", "--convert", "--task", "--pooler-config"): (
        "Leave it out: a model generates text, and there are no embeddings"
    ),
    ("--pipeline-parallel-size", "-pp"): "Give --tensor-parallel-size: there are no pipelines",
    ("--data-parallel-size", "-dp", "--api-server-count"): (
        "Start a server for each replica, or replicas on Ray: docs/Scaling.md"
    ),
    ("--distributed-executor-backend",): "Leave it out: --tensor-parallel-size starts processes",
    ("--swap-space", "--kv-offloading-size", "--kv-offloading-backend"): "Give --kv-host-gib",
    ("--cpu-offload-gb",): "Divide the model by --tensor-parallel-size: weights stay on the GPU",
    ("--num-gpu-blocks-override", "--kv-cache-memory-bytes"): "Give --num-blocks",
    ("--kv-transfer-config",): "Give --kv-host-gib or --kv-disk-path: there are no other stores",
    ("--kv-events-config",): "Give --kv-events",
    ("--enable-chunked-prefill",): (
        "Leave it out: prompts are always in chunks, and --max-num-batched-tokens bounds a step"
    ),
    ("--max-num-partial-prefills", "--long-prefill-token-threshold"): (
        "Give --policy small-chunks, or a policy of your own"
    ),
    ("--scheduling-policy", "--scheduler-cls"): (
        "Give --policy: fcfs, the default, serves by priority and then by arrival"
    ),
    ("--async-scheduling",): "Give --depth 2",
    ("--no-async-scheduling",): "Give --depth 1",
    ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"): (
        "Give --speculative-model or --speculative-method, and --num-speculative-tokens"
    ),
    ("--structured-outputs-config", "--guided-decoding-backend"): (
        "Leave it out: llguidance compiles every structure"
    ),
    ("--logits-processors", "--logits-processor-pattern"): "Send logit_bias with each request",
    ("--enable-auto-tool-choice",): "Leave it out: --tool-call-parser is enough",
    ("--enable-reasoning",): "Leave it out: --reasoning-parser is enough",
    ("--attention-backend", "--cudagraph-capture-sizes", "--max-seq-len-to-capture"): (
        "Leave it out: kernels and graphs are chosen by GPU and model"
    ),
    ("--compilation-config", "-O", "--optimization-level"): (
        "Leave it out, or give --torch-compile or --enforce-eager"
    ),
    ("--enable-sleep-mode",): "Give --admin-key: docs/Trainers.md",
    (
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
    ): "Put a proxy in front: docs/Deployment.md",
    ("--allowed-origins", "--allowed-methods", "--allowed-headers", "--allow-credentials"): (
        "Serve the page from the same origin, through a proxy: docs/Security.md"
    ),
    ("--uds", "--middleware"): "Put a proxy in front: forge serves TCP",
    ("--enable-log-requests", "--disable-log-requests", "--disable-uvicorn-access-log"): (
        "Leave it out: no request is logged"
    ),
    ("--disable-log-stats", "--uvicorn-log-level", "--log-level", "--log-config-file"): (
        "Leave it out: the log has a line for every ten seconds with work"
    ),
    ("--shutdown-timeout",): "Give --drain-timeout",
}
"""Flags of vLLM -> one remedy for all of them, as the end of an error."""


def vllm_remedy(name: str) -> str | None:
    """Return what to do instead of an option of vLLM, or None if the table does not have it.

    name   a flag or a key of a file, with dashes or underscores
    """
    flag = name.replace("_", "-")
    flag = "-O" if flag.startswith("-O") else flag if flag.startswith("-") else f"--{flag}"
    remedies = {each: remedy for names, remedy in VLLM_OPTIONS.items() for each in names}
    if flag in remedies or not flag.startswith("--no-"):
        return remedies.get(flag)
    remedy = remedies.get("--" + flag.removeprefix("--no-"))
    is_general = remedy is None or remedy.startswith("Leave it out")
    return remedy if is_general else "Leave it out: it is off"
