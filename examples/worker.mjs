#!/usr/bin/env node
// A worker for Unstuck in JavaScript: Node 18 or newer, no packages.
//
//   unstuck serve &
//   node examples/worker.mjs
//   unstuck enqueue greet '"Ada"'
//
// It claims jobs, beats while they run, tells their progress, settles them, and leaves in order on SIGTERM. It outlives
// a restart of the server: a job that runs goes on, and is settled when the server is back. If it is killed, its beats
// stop, and the server gives its jobs to somebody else.

import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

const SERVER = process.env.UNSTUCK_SERVER ?? "http://127.0.0.1:8642";
const TOKEN = process.env.UNSTUCK_TOKEN;
const QUEUE = process.env.UNSTUCK_QUEUE ?? "default";
const SLOTS = Number(process.env.UNSTUCK_WORKER_CONCURRENCY ?? 2);
const TIMEOUT = process.env.UNSTUCK_WORKER_HEARTBEAT_TIMEOUT; // "30s", or seconds. The server's default is five minutes.
const GRACE_MS = 1000 * Number(process.env.UNSTUCK_GRACE ?? 30);
const WAIT_S = 20;

// The tasks. Each gets the arguments of the job, and a context: progress(done, total, message), and a signal that is
// aborted when somebody cancels the job or it is no longer ours.
const tasks = {
  greet: async ([name]) => `Hello, ${name}`,
  nap: async ([seconds], { progress, signal }) => {
    for (let done = 0; done < seconds * 10; done++) {
      await sleep(100, undefined, { signal });
      if (done % 10 === 0) await progress(done / 10, seconds, "asleep");
    }
    return seconds;
  },
  boom: async () => { throw new TypeError("boom"); },
};

let worker; // What the server told us about ourselves.
let leaving = false;
const held = new Map(); // token → { job, abort }
const waiting = new AbortController(); // Ends the claim that waits, when we are told to go.

// One request, repeated until there is an answer. Everything that we send may be sent twice.
async function call(path, body, { signal, tries = Infinity } = {}) {
  for (let attempt = 1; ; attempt++) {
    try {
      const response = await fetch(`${SERVER}/api/v1/workers${path}`, {
        method: "POST",
        headers: { "content-type": "application/json", ...(TOKEN && { authorization: `Bearer ${TOKEN}` }) },
        body: JSON.stringify(body),
        signal: signal ?? AbortSignal.timeout(90_000),
      });
      const answer = await response.json();
      if (response.status < 500 && response.status !== 429) return { ok: response.ok, status: response.status, answer };
      log(`the server says ${response.status}: ${answer.detail}`);
    } catch (error) {
      if (signal?.aborted) throw error;
      log(`no answer (${error.cause?.code ?? error.message}), trying again`);
    }
    if (attempt >= tries) throw new Error(`no answer after ${tries} tries`);
    await sleep(Math.min(5_000, 100 * 2 ** attempt) * (0.5 + Math.random() / 2));
  }
}

async function register() {
  const { ok, answer } = await call("", {
    name: `${hostname()}-${process.pid}-${randomUUID().slice(0, 4)}`.replace(/[^\w.:/@+-]/g, "_"),
    instance: randomUUID(),
    queues: [QUEUE],
    tasks: Object.keys(tasks).map((name) => ({ name, queue: QUEUE, on_crash: "retry" })),
    concurrency: SLOTS,
    metadata: { hostname: hostname(), pid: process.pid, version: "example", language: "JavaScript" },
    ...(TIMEOUT && { heartbeat_timeout: TIMEOUT }),
  });
  if (!ok) throw new Error(answer.detail);
  worker = answer;
  log(`registered as ${worker.name} (${worker.id})`);
}

// The server does not know us any more: nothing that we hold is ours.
async function startAnew(problem) {
  log(problem.detail);
  for (const { abort } of held.values()) abort.abort(new Error("no longer ours"));
  held.clear();
  if (!leaving) await register();
}

async function beatForever() {
  while (worker !== undefined) {
    await sleep(1000 * worker.next_heartbeat_in, undefined, { ref: false });
    const jobs = [...held.values()].map(({ job }) => ({ job_id: job.job_id, token: job.token }));
    const { ok, answer } = await call(`/${worker.id}/beat`, { jobs });
    if (!ok) {
      await startAnew(answer);
      continue;
    }
    worker.next_heartbeat_in = answer.next_heartbeat_in;
    for (const { token, detail } of answer.lost) {
      log(detail);
      held.get(token)?.abort.abort(new Error("no longer ours"));
      held.delete(token);
    }
    for (const { token } of answer.cancel) held.get(token)?.abort.abort(new Error("cancelled"));
    if (answer.drain || answer.stop) leave("asked to go");
  }
}

async function run(job) {
  const id = worker.id;
  const fence = { job_id: job.job_id, token: job.token };
  const abort = held.get(job.token).abort;
  if (job.state !== "running") {
    const started = await call(`/${id}/start`, { jobs: [fence] });
    if (!started.ok) return log(started.answer.detail);
  }
  const progress = (done, total, message = "") =>
    call(`/${id}/progress`, { jobs: [{ ...fence, done, total, message }] }, { tries: 1 }).catch(() => {});
  let settled;
  try {
    const { args, kwargs } = job.payload;
    const result = await tasks[job.task](args, { ...kwargs, progress, signal: abort.signal });
    settled = { ...fence, outcome: "succeeded", result: result ?? null };
  } catch (error) {
    if (!held.has(job.token)) return; // Whatever we did counts for nobody.
    const why = abort.signal.reason?.message;
    if (abort.signal.aborted && why === "cancelled") settled = { ...fence, outcome: "cancelled" };
    else if (abort.signal.aborted) settled = { ...fence, outcome: "interrupted", error: { message: why } };
    else settled = { ...fence, outcome: "failed", error: { type: error.name, message: error.message, traceback: error.stack } };
  }
  // One turn: how this job ended, and the next one for its slot, which runs as soon as we have the answer.
  const turn = { settle: [settled], claim: leaving ? 0 : 1, have: [...held.keys()] };
  const { ok, answer } = await call(`/${id}/turn`, turn);
  log(ok ? `job ${job.job_id}: ${answer.results[0].status}` : answer.detail);
  held.delete(job.token);
  if (ok) take(answer.jobs);
}

// Run what a turn brought. A job may come twice, if two turns were on their way at once.
function take(jobs) {
  for (const job of jobs) {
    if (held.has(job.token)) continue;
    held.set(job.token, { job, abort: new AbortController() });
    run(job).catch((error) => log(error.message)).finally(() => held.delete(job.token));
  }
}

async function workForever() {
  while (!leaving) {
    const free = SLOTS - held.size;
    if (free === 0) {
      await sleep(20);
      continue;
    }
    let claimed;
    try {
      // What we hold and do not name here was claimed in an answer that we never got: it comes again. It is not started
      // yet: we may hang up while we wait, and what was only claimed goes back for free.
      claimed = await call(`/${worker.id}/turn`, { claim: free, wait: WAIT_S, start: false, have: [...held.keys()] }, { signal: waiting.signal });
    } catch {
      break; // We were told to go while we waited.
    }
    if (!claimed.ok) {
      await startAnew(claimed.answer);
      continue;
    }
    if (claimed.answer.drain || claimed.answer.stop) leave("asked to go");
    take(claimed.answer.jobs);
    if (claimed.answer.disabled) await sleep(1000 * worker.next_heartbeat_in);
  }
}

function leave(why) {
  if (leaving) return;
  log(`${why}: finishing ${held.size} jobs`);
  leaving = true;
  waiting.abort();
}

process.on("SIGTERM", () => leave("SIGTERM"));
process.on("SIGINT", () => leave("SIGINT"));

function log(text) {
  console.error(`${new Date().toISOString()} ${text}`);
}

await register();
beatForever().catch((error) => { log(error.message); process.exit(1); });
await workForever();

// Finish what runs. Whatever is not done when our patience ends is given up; its own rules say what becomes of it.
const until = Date.now() + GRACE_MS;
while (held.size > 0 && Date.now() < until) await sleep(20);
for (const { abort } of held.values()) abort.abort(new Error("the worker had to go"));
while (held.size > 0 && Date.now() < until + 5_000) await sleep(20);
await call(`/${worker.id}/shutdown`, {}, { tries: 5 });
log("gone in order");
process.exit(0);
