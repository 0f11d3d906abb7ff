"""KVEventOptions: where an engine publishes the changes of its prefix cache.

Owns the options and the check of addresses. Knows no socket and no engine.

    tcp://127.0.0.1:5557    this machine only
    ipc:///run/forge/kv     users that may open the file
    tcp://0.0.0.0:5557      refused without kv_events_public: events have the tokens of prompts

Always true: nothing is published unless an address is given.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from forge.errors import InvalidConfig

DEFAULT_TOPIC = "kv-events"
MAX_TOPIC_LENGTH = 256

EXAMPLE = "Give tcp://127.0.0.1:5557, say"
TCP_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:/;@]+):(?P<port>\d{1,5}|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventOptions:
    """Options of published KV events. Without `kv_events` there are none.

    kv_events          address to publish changes of the prefix cache on, tcp://127.0.0.1:5557, say;
                       the messages are vLLM's, and need the extra events
    kv_events_replay   address that sends missed messages again, tcp://127.0.0.1:5558, say
    kv_events_topic    topic of the messages, which subscribers choose by; llm-d has
                       kv@POD@MODEL
    kv_events_public   allow addresses that other machines reach: events have the tokens of prompts
    """

    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = DEFAULT_TOPIC
    kv_events_public: bool = False

    def __post_init__(self) -> None:
        if type(self.kv_events_public) is not bool:
            raise InvalidConfig(
                "kv_events_public", f"{self.kv_events_public!r} is no boolean", "Give one"
            )
        for name, endpoint in (
            ("kv_events", self.kv_events),
            ("kv_events_replay", self.kv_events_replay),
        ):
            if endpoint is not None:
                self._check_endpoint(name, endpoint)
        topic = self.kv_events_topic
        if type(topic) is not str or len(topic.encode(errors="replace")) > MAX_TOPIC_LENGTH:
            raise InvalidConfig(
                "kv_events_topic",
                f"{str(topic)[:64]!r} is no text of at most {MAX_TOPIC_LENGTH} bytes",
                "Give kv-events, say",
            )
        if self.kv_events is not None:
            return
        for name, is_given in (
            ("kv_events_replay", self.kv_events_replay is not None),
            ("kv_events_topic", topic != DEFAULT_TOPIC),
            ("kv_events_public", self.kv_events_public),
        ):
            if is_given:
                raise InvalidConfig(name, "no events are published", "Give kv_events too")

    def check_prefix_caching(self, is_enabled: bool) -> None:
        """Raise InvalidConfig for events of an engine that caches no prefixes."""
        if self.kv_events is not None and not is_enabled:
            raise InvalidConfig(
                "kv_events",
                "they are the changes of the prefix cache, and enable_prefix_caching is False",
                "Enable it, or leave kv_events out",
            )

    def _check_endpoint(self, name: str, endpoint: str) -> None:
        if type(endpoint) is str and re.fullmatch(r"ipc:///\S+", endpoint):
            return
        match = TCP_ENDPOINT.fullmatch(endpoint) if type(endpoint) is str else None
        if match is None or (match["port"] != "*" and not 0 < int(match["port"]) < 2**16):
            raise InvalidConfig(
                name,
                f"{str(endpoint)[:64]!r} is not tcp://ADDRESS:PORT or ipc:///PATH",
                EXAMPLE,
            )
        if not _is_loopback(match["host"]) and not self.kv_events_public:
            raise InvalidConfig(
                name,
                f"other machines can reach {endpoint[:64]}, and events have the tokens of prompts",
                "Give an address of this machine, as tcp://127.0.0.1:5557, or kv_events_public",
            )


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host. Names and wildcards count as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
