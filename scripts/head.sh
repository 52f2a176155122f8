#!/usr/bin/env bash
# Starts a local Ray head unless one answers where `make train` submits its jobs.
set -euo pipefail
cd "$(dirname "$0")/.."
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Serve reacts to its load figures within seconds instead of tens of them.
export RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S=2 RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S=2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

ray=.venv/bin/ray
$ray get-auth-token --generate >/dev/null
[ ! -f ~/.ray/auth_token ] || chmod 600 ~/.ray/auth_token
if $ray job list --address http://127.0.0.1:8265 >/dev/null 2>&1; then
    exit 0
fi
$ray start --head --dashboard-host 127.0.0.1 --disable-usage-stats >/dev/null
echo "started a local Ray head; dashboard http://127.0.0.1:8265 (token: ray get-auth-token), stop it with: make stop"
