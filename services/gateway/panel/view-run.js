// One run: its state, its log as it is written, its attempts and what happened to it.

import * as api from "./api.js";
import { action, fill, gathered, h, note } from "./dom.js";
import { chip, ENDED, instant, short, span, took } from "./format.js";
import { logView } from "./log.js";
import { t } from "./words.js";
import { outcome } from "./view-runs.js";

/** Who asked, in a word: a trigger's own name is only its id. */
function asker({ type, id }) {
  return id.startsWith("trigger:") ? t("trigger") : `${type}/${id}`;
}

/** A run and its live log. */
export async function runView({ view, project, rest }) {
  const base = `/projects/${project}/runs/${rest[0]}`;
  const head = h("div", { class: "head" });
  const facts = h("dl", { class: "facts" });
  const attempts = h("div", { class: "attempts" });
  const happened = h("ol", { class: "events" });
  const why = h("p", { class: "why", hidden: true });
  const place = h("div");
  let run = await api.get(base);
  let log = null;
  let showing = null;

  function draw() {
    fill(
      head,
      h("h1", {}, t("run.title", { task: run.task_name }), h("small", {}, short(run.id))),
      chip(run.status),
      h("span", { class: "space" }),
      ENDED.has(run.status)
        ? action(t("run.retry"), async () => {
            const made = await api.post(`${base}/retry`);
            location.hash = `#/run/${made.id}`;
          })
        : action(
            t("run.cancel"),
            async () => {
              await api.post(`${base}/cancel`);
              note(t("run.cancelled"));
            },
            { class: "bad" },
          ),
    );
    const pairs = [
      ["task", h("a", { href: `#/runs/${run.task_name}` }, `${run.task_name} · ${run.task_revision}`)],
      ["cause", run.trigger_type],
      ["by", asker(run.requested_by)],
      ["created", instant(run.created_at_ms)],
      run.scheduled_for_ms ? ["scheduled", instant(run.scheduled_for_ms)] : null,
      ["started", instant(run.started_at_ms)],
      ["took", took(run)],
      ["worker", run.worker_id ?? "–"],
      ["result", outcome(run) || "–"],
      ["id", h("code", {}, run.id)],
    ];
    fill(facts, pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, t(name)), h("dd", {}, value))));
  }

  function showLog(attempt) {
    log?.end();
    showing = attempt;
    log = logView(project, run.id, attempt);
    fill(place, log.element);
  }

  async function readMore() {
    const [tries, events] = await Promise.all([api.get(`${base}/attempts`), api.get(`${base}/events?limit=200`)]);
    const latest = Math.max(0, ...tries.items.map((one) => one.attempt));
    fill(
      attempts,
      tries.items.length > 1
        ? tries.items.map((one) =>
            h(
              "button",
              { type: "button", class: "quiet", "aria-pressed": String((showing ?? latest) === one.attempt), onclick: () => (showLog(one.attempt), readMore()) },
              `${t("attempt")} ${one.attempt} `,
              chip(one.status),
            ),
          )
        : [],
    );
    const began = events.items[0]?.created_at_ms ?? run.created_at_ms;
    fill(happened, events.items.map((event) => h("li", {}, h("span", { class: "dim" }, `+${span(event.created_at_ms - began)}`), h("code", {}, event.type))));
    if (!ENDED.has(run.status) && run.status !== "running") {
      const found = await api.get(`${base}/explain`).catch(() => null);
      why.hidden = !found;
      if (found) fill(why, h("strong", {}, found.sentence), " ", found.next_step);
    } else why.hidden = true;
  }
  const soon = gathered(() => readMore().catch(() => {}), 200);

  draw();
  fill(
    view,
    head,
    why,
    h("section", { class: "card" }, facts),
    attempts,
    place,
    h("details", { class: "card", open: true }, h("summary", {}, t("run.events")), happened),
  );
  showLog(null);
  soon();
  const stop = api.follow(`${base}/stream`, {
    run(row) {
      if (row.version < run.version) return;
      const next = row.attempt !== run.attempt && showing === null;
      run = row;
      draw();
      if (next) showLog(null);
      soon();
    },
    end: () => stop(),
  });
  const clock = setInterval(() => !ENDED.has(run.status) && run.started_at_ms && draw(), 1000);
  return {
    end() {
      stop();
      log?.end();
      soon.cancel();
      clearInterval(clock);
    },
  };
}
