#!/usr/bin/env bash
# Makes build/agents: the agents of tests/real_agents, beside .venv and not in it, for two of them ask for older packages than .venv holds.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/python -m venv build/agents
site=$(build/agents/bin/python -c 'import site; print(site.getsitepackages()[0])')
base=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
echo "import site; site.addsitedir('$base')" > "$site/base.pth"
build/agents/bin/python -m pip --disable-pip-version-check install -q -e '.[agents]'

if command -v npm >/dev/null; then
    npm install --prefix build/agents --no-fund --no-audit --no-update-notifier --loglevel error \
        @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 @qwen-code/qwen-code@0.15.10
else
    echo "no npm: the tests of the agents that are npm programs will be skipped" >&2
fi
touch build/agents/ready
