"""The commands `forge serve`, `forge generate` and `forge info`, and the lines that they print.

Owns the text on the terminal. Knows no scheduler, socket or model. The first line of a command's
docstring is its help.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import platform
import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from forge import __version__
from forge.async_llm import AsyncLLM
from forge.cli.options import KV_EVENT_OPTIONS, RECORD_OPTION, SAMPLING_OPTIONS
from forge.cli.settings import Settings, parse_value
from forge.config import EngineConfig
from forge.errors import InvalidConfig, RequestFailed
from forge.llm import LLM
from forge.request import SamplingParams
from forge.start_log import process_age_s

TRY_PROMPT = 'def read_file(path):\n    """Read'
"""Prompt of the command to try. The embedded model has learned from Python's library."""


def describe_capacity(config: EngineConfig) -> list[str]:
    """Describe the size of the cache, of its tiers, of the batch and of drafts, one line each."""
    blocks_per_sequence = -(-config.max_model_len // config.block_size)
    tenths = 10 * config.num_blocks // blocks_per_sequence  # rounded down: 1.0 is one that fits
    sequences = "1 sequence" if config.max_num_seqs == 1 else f"{config.max_num_seqs} sequences"
    num_cached_tokens = config.num_blocks * config.block_size
    # The last token of a sequence is never computed, so it needs no slot.
    note = (
        ", so max_model_len cannot be reached"
        if num_cached_tokens + 1 < config.max_model_len
        else ""
    )
    speculation = config.speculation
    return [
        f"cache    {config.num_blocks} blocks x {config.block_size} tokens = {num_cached_tokens} "
        "tokens",
        *_describe_tiers(config),
        f"batch    up to {sequences}; the cache holds {tenths // 10}.{tenths % 10} of the longest "
        f"({config.max_model_len} tokens){note}",
        *(
            [f"drafts   up to {speculation.num_tokens} a step, {speculation.acceptance}"]
            if speculation
            else ()
        ),
    ]


def _describe_tiers(config: EngineConfig) -> list[str]:
    """Describe the host pool and the files of blocks, where there are any."""
    tier = config.host_tier
    if tier is None:
        return []
    num_tokens = tier.num_blocks * config.block_size
    lines = [
        f"host     {tier.num_blocks} blocks x {config.block_size} tokens = {num_tokens} tokens"
    ]
    if tier.disk is not None:
        lines.append(f"disk     up to {tier.disk.max_files} files of a block")
    return lines


def format_banner(
    config: EngineConfig, model_name: str, url: str, api_keys: tuple[str, ...]
) -> str:
    """Return what the server prints when it is ready, with a command to try."""
    body = json.dumps(
        {"model": model_name, "prompt": TRY_PROMPT, "max_tokens": 40, "temperature": 0}
    )
    # 0.0.0.0 and :: are addresses to listen on, not to call.
    local_url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    line = (
        f"curl {local_url}/v1/completions -H 'content-type: application/json' -d "
        f"{shlex.quote(body)}"
    )
    if api_keys:  # the variable, since a log must not hold the key; it may have several
        key = "$FORGE_API_KEY" if len(api_keys) == 1 else "${FORGE_API_KEY%%,*}"
        line += f' -H "authorization: Bearer {key}"'
    head = [f"forge {__version__} is ready", f"model    {model_name}"]
    return "\n".join([*head, *describe_capacity(config), f"address  {url}", f"try      {line}"])


def log_server_start(age_before_s: float | None, age_after_s: float | None) -> None:
    """Log the time since this process started, before, during and after the engine's start."""
    age_s = process_age_s()
    if age_s is not None and age_before_s is not None and age_after_s is not None:
        logging.getLogger("forge.start").info(
            "ready %.1f s after the process started: imports %.1f, engine %.1f, server %.1f",
            *(age_s, age_before_s, age_after_s - age_before_s, age_s - age_after_s),
        )


def serve(args: argparse.Namespace, settings: Settings) -> int:
    """Serve a model over HTTP until Ctrl-C."""
    from forge.log import nonblocking_logging
    from forge.requirements import find_untested
    from forge.server.film import FilmFeed
    from forge.server.http_server import create_listener, run_server
    from forge.server.malloc_options import set_malloc_options
    from forge.server.request_defaults import RequestDefaults
    from forge.server.trace_option import open_traces
    from forge.server.weights_socket import open_weights_socket

    set_malloc_options()
    with nonblocking_logging(), ExitStack() as exit_stack:
        logging.getLogger("forge.statistics").setLevel(logging.INFO)
        for version in find_untested():
            logging.getLogger("forge.start").warning("untested version: %s", version)
        host, port = settings.values["host"], settings.values["port"]
        api_keys = settings.values["api_key"] or ()
        model_name = settings.values["served_model_name"] or settings.values["model"]
        limits = settings.limits
        trainer_access = settings.trainer_access
        # Loading a model can take minutes: an address that cannot be used is refused before.
        create_listener(host, port, api_keys).close()
        weights_socket = open_weights_socket(settings.values["weights_socket"], trainer_access)
        if weights_socket is not None:
            exit_stack.callback(weights_socket.close)  # also where the start fails
        traces = open_traces(settings.values["otlp_traces_endpoint"], model_name)
        age_before_s = process_age_s()
        llm = settings.open_llm(AsyncLLM.spawn)
        age_after_s = process_age_s()
        config = llm.engine.config
        film = FilmFeed(llm, settings.values["policy"]) if settings.values["film"] else None

        def print_banner(url: str) -> None:
            log_server_start(age_before_s, age_after_s)
            print(format_banner(config, model_name, url, api_keys))

        run_server(
            llm,
            host=host,
            port=port,
            api_keys=api_keys,
            served_model_name=model_name,
            on_ready=print_banner,
            allowed_hosts=settings.values["allowed_hosts"],
            metrics_compat=settings.values["metrics_compat"],
            reasoning_parser=settings.values["reasoning_parser"],
            reasoning_config=settings.values["reasoning_config"],
            tool_call_parser=settings.values["tool_call_parser"],
            request_defaults=RequestDefaults(
                *(settings.values[name] for name in RequestDefaults._fields)
            ),
            root_path=settings.values["root_path"] or "",
            trainer_access=trainer_access,
            film=film,
            traces=traces,
            weights_socket=weights_socket,
            limits=limits,
        )
    return 0


def generate(args: argparse.Namespace, settings: Settings) -> int:
    """Continue a prompt on the terminal."""
    flags = [(option, getattr(args, f"sampling_{option.name}")) for option in SAMPLING_OPTIONS]
    params_given = {
        option.name: parse_value(option, text, option.flag)
        for option, text in flags
        if text is not None
    }
    params_given["stop"] = args.stop
    SamplingParams(**cast(Any, params_given))  # refuses wrong ones before the model is loaded
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack characters
    with settings.open_llm(LLM) as llm:
        params = replace(llm.get_default_sampling_params(), **cast(Any, params_given))
        for delta in llm.stream(args.prompt, params):
            print(delta.text, end="", flush=True)
            if delta.error is not None:
                raise RequestFailed(delta.error)
    print()
    return 0


def port_in_use(host: str, port: int, api_keys: tuple[str, ...]) -> bool:
    """Return whether the address is in use. Raises InvalidConfig if no server can listen there."""
    from forge.server.http_server import create_listener

    try:
        create_listener(host, port, api_keys).close()
    except InvalidConfig as error:
        cause = error.__context__
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            return True  # probably by the very server that these options describe
        raise
    return False


def info(args: argparse.Namespace, settings: Settings) -> int:
    """Print versions, device and what would fit; takes the flags of serve."""
    from forge.requirements import find_untested, installed_version
    from forge.server.http_server import raise_file_limit

    untested_versions = ", ".join(map(str, find_untested()))
    host, port = settings.values["host"], settings.values["port"]
    api_keys = settings.values["api_key"] or ()
    # A server may be recording to this file now, and publish on this address.
    unused_names = {each.name for each in (RECORD_OPTION, *KV_EVENT_OPTIONS)}
    settings = settings._replace(explicit=settings.explicit - unused_names)
    # Refuses the same limits as a server would.
    raise_file_limit(settings.limits.max_connections)
    with settings.open_llm(LLM) as llm:
        in_use_note = ", in use now" if port_in_use(host, port, api_keys) else ""
        print(f"forge    {__version__}")
        print(f"python   {platform.python_version()}")
        print(f"torch    {installed_version('torch') or 'not installed'}")
        print(f"versions all tested{' but ' + untested_versions if untested_versions else ''}")
        print(f"device   {llm.device}, {platform.machine()}")
        print(f"model    {settings.values['model']}")
        print("\n".join(describe_capacity(llm.engine.config)))
        if llm.sampling_defaults.fields:
            print(f"sampling {llm.sampling_defaults.describe()}, of generation_config.json")
        print(f"address  {f'[{host}]' if ':' in host else host}:{port}{in_use_note}")
    return 0
