// The list of runs, live.

import * as api from "./api.js";
import { fill, gathered, h, keyed } from "./dom.js";
import { chip, ENDED, instant, short, took } from "./format.js";
import { t } from "./words.js";

const STATES = ["running", "queued", "waiting_approval", "retry_wait", "succeeded", "failed", "cancelled", "timed_out"];
const PAGE = 50;

/** Runs, newest first, by task and state; rows change in place as facts arrive. */
export async function runsView({ view, project, rest }) {
  const wanted = { task: rest[0] ?? "", status: "" };
  let shown = [];
  let limit = PAGE;
  const rows = h("tbody");
  const empty = h("p", { class: "empty", hidden: true }, t("runs.none"));
  const more = h("button", { type: "button", hidden: true, onclick: () => ((limit += PAGE), read()) }, t("more"));
  const live = h("span", { class: "live" }, t("live"));
  const tasks = h("select", { "aria-label": t("task"), onchange: (event) => ((wanted.task = event.target.value), again()) });
  const states = h(
    "select",
    { "aria-label": t("status"), onchange: (event) => ((wanted.status = event.target.value), again()) },
    h("option", { value: "" }, t("all.states")),
    STATES.map((state) => h("option", { value: state }, t(`state.${state}`))),
  );

  function again() {
    limit = PAGE;
    read();
  }

  async function read() {
    const query = new URLSearchParams({ limit: String(Math.min(limit, 200)) });
    if (wanted.task) query.set("task", wanted.task);
    if (wanted.status) query.set("status", wanted.status);
    const page = await api.get(`/projects/${project}/runs?${query}`);
    shown = page.items;
    empty.hidden = shown.length > 0;
    more.hidden = !page.next || limit >= 200;
    keyed(rows, shown, (run) => run.id, makeRow, updateRow);
  }
  const soon = gathered(read, 400);

  function fact(change) {
    const run = shown.find((known) => known.id === change.run_id);
    if (run && change.version > run.version) {
      // At once what the fact says; the row itself is read with the next gathering.
      Object.assign(run, { status: change.status, version: change.version, exit_code: change.exit_code });
      const row = [...rows.children].find((child) => child.dataset.key === run.id);
      if (row) updateRow(row, run);
    }
    soon();
  }

  const listed = await api.get(`/projects/${project}/tasks?limit=200`).then((page) => page.items, () => []);
  fill(
    tasks,
    h("option", { value: "" }, t("all.tasks")),
    listed.map((task) => h("option", { value: task.name, selected: task.name === wanted.task }, task.name)),
  );
  await read();
  fill(
    view,
    h("div", { class: "head" }, h("h1", {}, t("runs")), live, h("span", { class: "space" }), tasks, states),
    h(
      "section",
      { class: "card flush" },
      h(
        "table",
        { class: "rows" },
        h("thead", {}, h("tr", {}, ["task", "status", "started", "took", "cause", "result"].map((name) => h("th", { scope: "col" }, t(name))))),
        rows,
      ),
      empty,
    ),
    h("div", { class: "row middle" }, more),
  );
  const stop = api.follow(`/projects/${project}/events`, {
    open: () => (live.classList.remove("down"), fill(live, t("live"))),
    down: () => (live.classList.add("down"), fill(live, t("live.down"))),
    ready: soon,
    reset: soon,
    run: fact,
  });
  const clock = setInterval(() => {
    for (const run of shown) {
      if (run.started_at_ms && !ENDED.has(run.status)) {
        const row = [...rows.children].find((child) => child.dataset.key === run.id);
        if (row) fill(row.children[3], took(run));
      }
    }
  }, 1000);
  return {
    end() {
      stop();
      soon.cancel();
      clearInterval(clock);
    },
  };
}

function makeRow(run) {
  const cell = (name) => h("td", { data: { label: t(name) } });
  const link = h("a", { href: `#/run/${run.id}` }, run.task_name, h("small", {}, short(run.id)));
  return h("tr", {}, h("td", { class: "name" }, link), cell("status"), cell("started"), cell("took"), cell("cause"), cell("result"));
}

function updateRow(row, run) {
  const print = `${run.version}|${run.finished_at_ms}`;
  if (row.dataset.print === print) return;
  row.dataset.print = print;
  const [, status, started, lasted, cause, result] = row.children;
  fill(status, chip(run.status));
  fill(started, instant(run.started_at_ms ?? run.created_at_ms));
  fill(lasted, took(run));
  fill(cause, run.trigger_type);
  fill(result, outcome(run));
}

/** Exit code or error of a run, in a word. */
export function outcome(run) {
  if (run.waiting_reason && !ENDED.has(run.status)) return run.waiting_reason;
  if (run.exit_code !== null && run.exit_code !== undefined) return `${t("exit")} ${run.exit_code}`;
  return run.error_summary ?? run.error_code ?? "";
}
