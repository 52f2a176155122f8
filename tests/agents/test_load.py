"""Loading AgentRunner from a path: what works, and that each fault is told in one error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from molt_ray.agents.load import AgentLoadError, load_runner

ENV = """
from molt_ray.agents import Env, Result, StepEnvRunner
class MyEnv(Env):
    async def step(self, state):
        return Result(reward=1.0)
"""


def write(folder: Path, text: str, name: str = "agent.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    "form",
    [
        "class AgentRunner(StepEnvRunner):\n    env_class = MyEnv\n",
        "class AgentRunner(StepEnvRunner):\n    def __init__(self):\n        super().__init__(MyEnv)\n",
    ],
)
def test_both_ways_to_name_the_class(tmp_path, form):
    runner = load_runner(write(tmp_path, ENV + form))
    assert runner.user_class.__name__ == "MyEnv"
    assert not runner.blocking


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ENV, "defines no AgentRunner"),
        (ENV + "AgentRunner = 3\n", "not a subclass of StepEnvRunner or ChatAgentRunner"),
        (ENV + "class AgentRunner(MyEnv): pass\n", "not a subclass of StepEnvRunner or ChatAgentRunner"),
        (ENV + "class AgentRunner(StepEnvRunner): pass\n", "env_class is None: set it to your subclass of Env"),
        (ENV + "class AgentRunner(StepEnvRunner):\n    env_class = int\n", "set it to your subclass of Env"),
        (ENV + "class AgentRunner(StepEnvRunner):\n    env_class = Env\n", "Env has no step(self, state)"),
        (ENV + "raise RuntimeError('broken at the end')\n", "line 6, in <module>"),
        ("import no_such_module_here\n", "No module named 'no_such_module_here'"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit(3)"),
    ],
)
def test_a_faulty_file_is_refused_with_its_reason(tmp_path, text, says):
    with pytest.raises(AgentLoadError) as caught:
        load_runner(write(tmp_path, text))
    assert says in str(caught.value)
    assert "--train.agent_path" in str(caught.value)


def test_a_missing_file_names_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentLoadError, match="no such file") as caught:
        load_runner("nowhere.py")
    assert str(tmp_path / "nowhere.py") in str(caught.value)


def test_helpers_beside_the_file_import_and_shadow_nothing(tmp_path):
    write(tmp_path, "WORD = 'beside'\n", "h4_helper.py")
    write(tmp_path, "raise AssertionError('shadows the standard library')\n", "json.py")
    runner = load_runner(
        write(
            tmp_path,
            "import h4_helper, json\n"
            + ENV
            + "class AgentRunner(StepEnvRunner):\n    env_class = MyEnv\n    word = h4_helper.WORD\n",
        )
    )
    assert runner.word == "beside"
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("methods", "blocking"),
    [
        ("    async def step(self, state): ...\n", False),
        ("    def step(self, state): ...\n", True),
        ("    async def step(self, state): ...\n    def reset(self, state): ...\n", True),
        ("    async def step(self, state): ...\n    def close(self): ...\n", True),
    ],
)
def test_a_method_that_is_not_async_makes_an_env_blocking(tmp_path, methods, blocking):
    text = f"from molt_ray.agents import *\nclass MyEnv(Env):\n{methods}class AgentRunner(StepEnvRunner):\n    env_class = MyEnv\n"
    assert load_runner(write(tmp_path, text)).blocking is blocking


def test_a_chat_agent_without_run_is_refused(tmp_path):
    text = "from molt_ray.agents import *\nclass AgentRunner(ChatAgentRunner):\n    agent_class = ChatAgent\n"
    with pytest.raises(AgentLoadError, match=r"no run\(self, ctx\)"):
        load_runner(write(tmp_path, text))


@pytest.mark.parametrize("name", ["last_digit_env", "last_digit_chat"])
def test_the_examples_load_and_do_not_block(name):
    example = Path(__file__).parents[2] / "agents" / f"{name}.py"
    assert not load_runner(str(example)).blocking
