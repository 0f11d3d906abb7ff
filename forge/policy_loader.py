"""load_policy: a policy by its name, or from a Python file.

Owns what a file must define. Runs the file: it is the operator's.
"""

from __future__ import annotations

import runpy
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb

from forge.errors import InvalidConfig
from forge.policies import policy_names, policy_path
from forge.policy import POLICIES, Policy

MAX_NAME_CHARS = 256
"""Names from this length on are not looked up as files: systems refuse them."""


def load_policy(name_or_policy: str | Policy) -> Policy:
    """Return the policy of that name, or the one that the named file defines as `policy`.

    Raises InvalidConfig.
    """
    if isinstance(name_or_policy, Policy):
        return name_or_policy
    names = ", ".join(policy_names())
    if not isinstance(name_or_policy, str):
        raise InvalidConfig("policy", f"{name_or_policy!r} is no name", f"Use {names} or a FILE.py")
    if name_or_policy in POLICIES:
        return POLICIES[name_or_policy]
    path = policy_path(name_or_policy)
    if path is None:
        name, file = name_or_policy[:64], f"{name_or_policy}.py"
        is_file = len(file) < MAX_NAME_CHARS and Path(file).is_file()
        meant = [file] if is_file else get_close_matches(name, policy_names(), 1)
        remedy = "".join(f"Use {each}. Policies are: " for each in meant) or "Use "
        raise InvalidConfig("policy", f"{name!r} is not known", f"{remedy}{names} or a FILE.py")
    if not path.is_file():
        raise InvalidConfig(
            "policy", f"there is no file {name_or_policy!r}", f"Use {names} or a FILE.py"
        )
    try:
        policy = runpy.run_path(str(path)).get("policy")
    except (Exception, SystemExit) as error:
        raise InvalidConfig(
            "policy", _policy_file_problem(str(path), error), "Fix the policy"
        ) from error
    if not isinstance(policy, Policy) or not policy.is_complete:
        raise InvalidConfig(
            "policy",
            f"{name_or_policy} does not define `policy`",
            "Assign it a forge.policy.Policy",
        )
    return policy


def _policy_file_problem(file: str, error: BaseException) -> str:
    """Return why a policy's file does not run, with the line, if the error came from one."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    where, cause = f"{file}:{lines[-1]}" if lines else file, str(error)
    if isinstance(error, SyntaxError):  # maybe of a module that the file imports
        where, cause = f"{error.filename}:{error.lineno}", error.msg
    return f"{where} does not run: {type(error).__name__}: {cause}"
