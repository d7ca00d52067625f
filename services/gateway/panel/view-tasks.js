// Tasks: what there is to run, when it runs by itself, and running it now.

import * as api from "./api.js";
import { action, field, fill, form, gathered, h, note } from "./dom.js";
import { instant, schedule, short } from "./format.js";
import { language, t } from "./words.js";

/** Tasks by name, with their schedules. */
export async function tasksView({ view, project }) {
  const rows = h("tbody");
  const empty = h("p", { class: "empty", hidden: true }, t("tasks.none"));
  const maker = h("dialog", { "aria-label": t("task.new") });

  async function read() {
    const [tasks, triggers] = await Promise.all([
      api.get(`/projects/${project}/tasks?limit=200`),
      api.get(`/projects/${project}/triggers?limit=200`).catch(() => ({ items: [] })),
    ]);
    const of = new Map();
    for (const trigger of triggers.items) of.set(trigger.task_id, [...(of.get(trigger.task_id) ?? []), trigger]);
    empty.hidden = tasks.items.length > 0;
    fill(rows, tasks.items.map((task) => row(task, of.get(task.id) ?? [])));
  }

  function row(task, triggers) {
    const on = triggers.filter((trigger) => trigger.enabled);
    const next = Math.min(...on.map((trigger) => trigger.next_fire_at_ms ?? Infinity));
    return h(
      "tr",
      { class: task.enabled ? null : "off" },
      h(
        "td",
        { class: "name" },
        h("a", { href: `#/runs/${task.name}` }, task.name, h("small", {}, task.spec.title ?? task.spec.execution.command.join(" "))),
        task.spec.terms?.needs_approval ? h("span", { class: "tag" }, t("needs.approval.short")) : null,
        task.enabled ? null : h("span", { class: "tag" }, t("disabled")),
      ),
      h("td", { data: { label: t("schedule") } }, on.length ? on.map((one) => h("code", { class: "line" }, schedule(one))) : h("span", { class: "dim" }, t("manual"))),
      h("td", { data: { label: t("next") } }, Number.isFinite(next) && task.enabled ? instant(next) : h("span", { class: "dim" }, "–")),
      h(
        "td",
        { class: "acts" },
        action(
          t("run.now"),
          async () => {
            const run = await api.post(`/projects/${project}/tasks/${task.name}/runs`);
            note(t("run.made", { id: short(run.id) }));
            location.hash = `#/run/${run.id}`;
          },
          { class: "main", "aria-label": `${t("run.now")}: ${task.name}` },
        ),
        action(
          t(task.enabled ? "disable" : "enable"),
          async () => {
            await api.post(`/projects/${project}/tasks/${task.name}/${task.enabled ? "disable" : "enable"}`);
            await read();
          },
          { "aria-label": `${t(task.enabled ? "disable" : "enable")}: ${task.name}` },
        ),
      ),
    );
  }

  function openMaker() {
    const name = h("input", { name: "name", required: true, maxlength: "63", autocapitalize: "none", spellcheck: "false" });
    const command = h("textarea", { name: "spec.execution.command[0]", rows: "3", required: true, spellcheck: "false" });
    const cron = h("input", { name: "triggers[0].expression", spellcheck: "false", maxlength: "255" });
    const zone = h("input", { name: "triggers[0].timezone", value: Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC" });
    const held = h("input", { type: "checkbox", id: "held" });
    const meant = h("p", { class: "dim", "aria-live": "polite" });
    const explain = gathered(async () => {
      const expression = cron.value.trim();
      if (!expression) return fill(meant);
      const spec = { kind: "cron", expression, timezone: zone.value.trim() || "UTC" };
      try {
        const found = await api.post(`/projects/${project}/triggers/preview`, { spec, count: 3 });
        if (expression !== cron.value.trim()) return;
        const words = language().startsWith("zh") ? found.chinese : found.english;
        fill(meant, words, found.instants.map((at) => h("small", {}, " · ", instant(at))));
      } catch (error) {
        if (expression === cron.value.trim()) fill(meant, error.message);
      }
    }, 300);
    for (const input of [cron, zone]) input.addEventListener("input", explain);
    const made = form(
      [
        field(t("name"), name),
        field(t("command"), command, t("command.hint")),
        field(t("schedule"), cron, t("cron.hint")),
        field(t("timezone"), zone),
        meant,
        h("div", { class: "check" }, held, h("label", { htmlFor: "held" }, t("needs.approval"))),
      ],
      t("task.create"),
      async () => {
        const body = {
          name: name.value.trim(),
          spec: { execution: { command: ["sh", "-c", command.value] }, terms: { needs_approval: held.checked } },
          triggers: cron.value.trim() ? [{ kind: "cron", expression: cron.value.trim(), timezone: zone.value.trim() || "UTC" }] : [],
        };
        const task = await api.post(`/projects/${project}/tasks`, body);
        maker.close();
        note(t("task.created", { name: task.name }));
        await read();
      },
    );
    made.querySelector(".row").append(h("button", { type: "button", onclick: () => maker.close() }, t("cancel")));
    fill(maker, h("h2", {}, t("task.new")), made);
    maker.showModal();
    name.focus();
  }

  await read();
  fill(
    view,
    h(
      "div",
      { class: "head" },
      h("h1", {}, t("tasks")),
      h("span", { class: "space" }),
      h("button", { type: "button", class: "main", onclick: openMaker }, t("task.new")),
    ),
    h(
      "section",
      { class: "card flush" },
      h(
        "table",
        { class: "rows" },
        h("thead", {}, h("tr", {}, ["name", "schedule", "next"].map((name) => h("th", { scope: "col" }, t(name))), h("th", {}))),
        rows,
      ),
      empty,
    ),
    maker,
  );
  const soon = gathered(() => read().catch(() => {}), 500);
  const stop = api.follow(`/projects/${project}/events`, { task: soon, trigger: soon, reset: soon });
  return {
    end() {
      stop();
      soon.cancel();
    },
  };
}
