#!/usr/bin/env bash
# A worker for Unstuck in bash: needs curl, jq and ps.
#
#   unstuck serve &
#   examples/worker.sh
#   unstuck enqueue greet '"Ada"'
#
# One job at a time. It beats from a process of its own while the job runs, outlives a restart of the server, and leaves
# in order on SIGTERM. If it is killed, the beats stop with it, and the server gives its job to somebody else.

set -uo pipefail

server=${UNSTUCK_SERVER:-http://127.0.0.1:8642}
queue=${UNSTUCK_QUEUE:-default}
heartbeat_timeout=${UNSTUCK_WORKER_HEARTBEAT_TIMEOUT:-5m}   # "30s", or seconds.
main=$$
room=$(mktemp -d)   # Where the beating process and the working one leave notes for each other.
trap 'rm -rf "$room"' EXIT
leaving=
outcome=   # How the last job ended, until the server knows.

# The tasks: arguments as JSON on stdin, the result as JSON on stdout, progress by calling `progress`.
task_greet() { jq '"Hello, " + .args[0]'; }
task_nap() {
  local seconds tenth
  seconds=$(jq -r '.args[0]')
  for ((tenth = 0; tenth < seconds * 10; tenth++)); do
    ((tenth % 10)) || progress "$((tenth / 10))" "$seconds" asleep >&2
    sleep 0.1
  done
  printf '%s\n' "$seconds"
}
task_boom() { echo "boom" >&2; return 3; }
tasks='["greet", "nap", "boom"]'

log() { printf '%s %s\n' "$(date -u +%FT%TZ)" "$*" >&2; }

# One request; the answer is in $room/answer-PID and its status in $status. 000: no answer.
post() {
  local path=$1 body=$2 wait=${3:-30}
  answer=$room/answer-$BASHPID
  status=$(curl --silent --max-time "$wait" --output "$answer" --write-out '%{http_code}' \
    ${UNSTUCK_TOKEN:+--header "Authorization: Bearer $UNSTUCK_TOKEN"} \
    --header 'Content-Type: application/json' --data-binary "$body" "$server/api/v1/workers$path") || status=000
}

# The same, repeated until the server answers. Everything that we send may be sent twice.
post_surely() {
  local pause=0.1
  while :; do
    post "$@"
    case $status in
      000 | 429 | 5??) log "no answer ($status), trying again" ;;
      *) return ;;
    esac
    sleep "$pause"
    pause=$(jq -n "[$pause * 2, 5] | min")
  done
}

told() { jq -r "$1" "$answer"; }

register() {
  local body
  body=$(jq -n --arg name "$(hostname)-$main-$RANDOM" --arg instance "$RANDOM$RANDOM$RANDOM$RANDOM" --arg queue "$queue" \
    --argjson tasks "$tasks" --arg timeout "$heartbeat_timeout" --arg host "$(hostname)" --argjson pid "$main" '{
      name: $name, instance: $instance, queues: [$queue], concurrency: 1, heartbeat_timeout: $timeout,
      tasks: [$tasks[] | {name: ., queue: $queue, on_crash: "retry"}],
      metadata: {hostname: $host, pid: $pid, version: "example", language: "bash"}}')
  post_surely "" "$body"
  [[ $status == 201 ]] || { log "$(told .detail)"; exit 1; }
  worker=$(told .id)
  told .next_heartbeat_in >"$room/interval"
  printf '%s' "$worker" >"$room/worker"
  log "registered as $(told .name) ($worker)"
}

progress() {
  post "/$worker/progress" "$(jq -n --argjson job "$fence" --argjson done "$1" --argjson total "$2" --arg message "$3" \
    '{jobs: [$job + {done: $done, total: $total, message: $message}]}')" 5
}

# Ends with the worker, however that ends: a beat without a worker behind it would be a lie. (`kill -0` would not tell: a
# process that was killed and not yet reaped still has its number.)
beat_forever() {
  trap - EXIT TERM INT
  local jobs me=$BASHPID
  while sleep "$(cat "$room/interval")" && (($(ps -o ppid= -p "$me") == main)); do
    jobs=$(cat "$room/fence" 2>/dev/null)
    post "/$(cat "$room/worker")/beat" "{\"jobs\": [${jobs}]}" 10
    case $status in
      200)
        told .next_heartbeat_in >"$room/interval"
        if [[ $(told '(.lost + .cancel) | length') != 0 ]]; then
          told '.lost[].detail' >&2
          told 'if (.cancel | length) > 0 then "cancelled" else "lost" end' >"$room/stopped"
          stop_job
        fi
        [[ $(told '.drain or .stop') == true ]] && kill -TERM "$main"
        ;;
      409)
        log "$(told .detail)"
        echo lost >"$room/stopped"
        touch "$room/dead"
        stop_job
        ;;
    esac
  done
  # The worker was killed: nobody will settle what runs.
  stop_job
  rm -rf "$room"
}

stop_job() {
  local pid
  pid=$(cat "$room/pid" 2>/dev/null) && [[ -n $pid ]] && kill -TERM -- "-$pid" 2>/dev/null
}

# Run one job in a process group of its own. What became of it is in $outcome, for the next turn.
run() {
  local job=$1 task code=0 pid
  task=$(jq -r .task <<<"$job")
  fence=$(jq -c '{job_id, token}' <<<"$job")
  rm -f "$room/stopped"
  printf '%s' "$fence" >"$room/fence"
  if [[ $(jq -r .state <<<"$job") != running ]]; then
    post_surely "/$worker/start" "{\"jobs\": [$fence]}"
    [[ $status == 200 ]] || { log "$(told .detail)"; : >"$room/fence"; return; }
  fi
  jq .payload <<<"$job" >"$room/payload"
  set -m   # In a process group of its own, so that it can be ended with all that it started.
  (trap - EXIT TERM INT; "task_$task") <"$room/payload" >"$room/stdout" 2>"$room/stderr" &
  pid=$!
  set +m
  printf '%s' "$pid" >"$room/pid"
  # A signal ends `wait`, not the job: we finish what runs.
  while wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null; do :; done
  : >"$room/pid"
  if [[ $(cat "$room/stopped" 2>/dev/null) != lost ]]; then
    outcome=$(jq -cn --argjson job "$fence" --argjson code "$code" --arg stopped "$(cat "$room/stopped" 2>/dev/null)" \
      --rawfile out "$room/stdout" --rawfile err "$room/stderr" '$job + (
        if $stopped == "cancelled" then {outcome: "cancelled"}
        elif $code == 0 then {outcome: "succeeded", result: ($out | fromjson? // $out)}
        else {outcome: "failed", error: {type: "ExitCode", message: "exit code \($code)", traceback: $err}, stdout: $out}
        end) + {stderr: $err}')
  fi
  : >"$room/fence"
}

# Say what the server made of the last outcome.
settled() {
  [[ -n $outcome ]] && log "job $(jq .job_id <<<"$outcome"): $(told '.results[0].status // .detail')"
  outcome=
}

work_forever() {
  local known body
  while [[ -z $leaving ]]; do
    if [[ -e $room/dead ]]; then
      rm -f "$room/dead"
      register
    fi
    # One turn: how the last job ended, and the next one, which runs as soon as we have the answer. Without an outcome we
    # wait for a job and only claim it: if we hang up meanwhile, it goes back for free. In the background, so that a
    # signal is heard. What the server thinks we hold besides was claimed in an answer that we never got, and comes again.
    if [[ -n $outcome ]]; then
      body="{\"settle\": [$outcome], \"claim\": 1, \"have\": []}"
    else
      body='{"claim": 1, "start": false, "wait": 20, "have": []}'
    fi
    (post "/$worker/turn" "$body" 40; echo "$status"; cat "$answer" 2>/dev/null) >"$room/claimed" &
    known=$!
    while wait "$known"; kill -0 "$known" 2>/dev/null; do [[ -n $leaving && -z $outcome ]] && kill "$known" 2>/dev/null; done
    case $(head -n 1 "$room/claimed") in
      200)
        answer=$room/claim
        tail -n +2 "$room/claimed" >"$answer"
        settled
        [[ $(told '.drain or .stop') == true ]] && leaving=yes
        while read -r job; do run "$job"; done < <(jq -c '.jobs[]' "$answer")
        ;;
      409)
        answer=$room/claim
        tail -n +2 "$room/claimed" >"$answer"
        settled
        touch "$room/dead"
        ;;
      *)
        [[ -n $leaving ]] || sleep 0.5
        ;;
    esac
  done
}

trap 'log "told to go"; leaving=yes' TERM INT

for needed in curl jq ps; do
  command -v "$needed" >/dev/null || { log "$needed is needed"; exit 1; }
done
register
beat_forever &
beating=$!
work_forever
if [[ -n $outcome ]]; then
  post_surely "/$worker/turn" "{\"settle\": [$outcome]}"
  settled
fi
# What we only claimed goes back; nothing runs any more.
post "/$worker/shutdown" '{}' 10
kill "$beating" 2>/dev/null
log "gone in order"
