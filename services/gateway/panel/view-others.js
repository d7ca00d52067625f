// Approvals, secrets and workers.

import * as api from "./api.js";
import { action, field, fill, form, gathered, h, note } from "./dom.js";
import { chip, instant, size } from "./format.js";
import { strongly } from "./view-session.js";
import { t } from "./words.js";

function table(names, rows, empty) {
  return h(
    "section",
    { class: "card flush" },
    h("table", { class: "rows" }, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name ? t(name) : "")))), rows),
    empty,
  );
}

/** Requests that wait for a person's word, and those that had it. */
export async function approvalsView({ view, project }) {
  const list = h("div", { class: "stack" });
  const empty = h("p", { class: "empty", hidden: true }, t("approvals.none"));
  const which = h(
    "select",
    { "aria-label": t("status"), onchange: () => read() },
    h("option", { value: "pending" }, t("approval.open")),
    h("option", { value: "" }, t("approval.all")),
  );

  async function read() {
    const query = which.value ? `&state=${which.value}` : "";
    const page = await api.get(`/projects/${project}/approvals?limit=100${query}`);
    empty.hidden = page.items.length > 0;
    fill(list, page.items.map(card));
  }

  function card(one) {
    const reason = h("input", { maxlength: "1024" });
    const decide = (decision) => async () => {
      const body = { decision, expected_version: one.version };
      if (reason.value) body.reason = reason.value;
      const told = await strongly(() => api.post(`/projects/${project}/approvals/${one.id}/decision`, body));
      note(t("approval.decided", { state: t(`state.${told.state}`) }));
      await read();
    };
    const { changes = [], cut, ...facts } = one.preview ?? {};
    // A text of several lines must not look like lines of ours.
    const plain = (value) => (typeof value === "string" && !/[\n\r\u2028\u2029]/.test(value) ? value : JSON.stringify(value));
    const preview = [
      ...Object.entries(facts).map(([name, value]) => `${name}: ${plain(value)}`),
      ...changes.flatMap(({ path, before, after }) => [
        ...(before === null ? [] : [`- ${path}: ${plain(before)}`]),
        ...(after === null ? [] : [`+ ${path}: ${plain(after)}`]),
      ]),
      ...(cut ? [t("approval.cut")] : []),
    ];
    const plan = h("pre", { class: "preview", hidden: true });
    const showPlan = async () => {
      plan.textContent = JSON.stringify((await api.get(`/projects/${project}/approvals/${one.id}`)).plan, null, 2);
      plan.hidden = false;
    };
    return h(
      "article",
      { class: "card" },
      h("div", { class: "head" }, h("h2", {}, one.preview?.task_name ?? one.preview?.task ?? one.action_type), chip(one.state), h("span", { class: `tag risk-${one.risk}` }, `${t("risk")}: ${one.risk}`)),
      h(
        "dl",
        { class: "facts" },
        [
          ["action", one.action_type],
          ["by", `${one.requested_by.type}/${one.requested_by.id}`],
          ["requested", instant(one.requested_at_ms)],
          ...(one.not_before_ms ? [["due", instant(one.not_before_ms)]] : []),
          ["expires", instant(one.expires_at_ms)],
          ...one.decisions.map((decision) => ["decision", `${t(`state.${decision.decision}`)} · ${decision.decided_by.id}${decision.reason ? ` · ${decision.reason}` : ""}`]),
        ].map(([name, value]) => h("div", {}, h("dt", {}, t(name)), h("dd", {}, value))),
      ),
      preview.length ? h("pre", { class: "preview" }, preview.join("\n")) : null,
      ["task.change", "run.create"].includes(one.action_type) ? h("p", {}, action(t("approval.plan"), showPlan)) : null,
      plan,
      one.action_type === "run.release" ? h("p", {}, h("a", { href: `#/run/${one.id}` }, t("run.this"))) : null,
      one.state === "pending"
        ? h("div", { class: "decide" }, field(t("reason"), reason), action(t("approve"), decide("approved"), { class: "main" }), action(t("reject"), decide("rejected"), { class: "bad" }))
        : null,
    );
  }

  await read();
  fill(view, h("div", { class: "head" }, h("h1", {}, t("approvals")), h("span", { class: "space" }), which), empty, list);
  // While somebody writes a reason, nothing is drawn anew under the hands.
  const soon = gathered(() => (list.contains(document.activeElement) ? null : read().catch(() => {})), 400);
  const stop = api.follow(`/projects/${project}/events`, { approval: soon, reset: soon });
  return {
    end() {
      stop();
      soon.cancel();
    },
  };
}

/** Names and versions of secrets; values go in and never come out. */
export async function secretsView({ view, project }) {
  const rows = h("tbody");
  const empty = h("p", { class: "empty", hidden: true }, t("secrets.none"));

  async function read() {
    const page = await api.get(`/projects/${project}/secrets?limit=200`);
    empty.hidden = page.items.length > 0;
    fill(
      rows,
      page.items.map((one) =>
        h(
          "tr",
          {},
          h("td", { class: "name" }, h("code", {}, one.name)),
          h("td", { data: { label: t("version") } }, String(one.version)),
          h("td", { data: { label: t("created") } }, instant(one.created_at_ms)),
        ),
      ),
    );
  }

  const name = h("input", { name: "name", required: true, maxlength: "63", autocapitalize: "none", spellcheck: "false" });
  const value = h("textarea", { name: "value", rows: "2", autocomplete: "off", spellcheck: "false", class: "veiled", required: true });
  const set = form([field(t("name"), name), field(t("value"), value, t("secret.hint"))], t("secret.set"), async () => {
    const made = await api.put(`/projects/${project}/secrets/${encodeURIComponent(name.value.trim())}`, { value: value.value });
    note(t("secret.saved", { name: made.name, version: String(made.version) }));
    name.value = value.value = "";
    await read();
  });
  await read();
  fill(view, h("div", { class: "head" }, h("h1", {}, t("secrets"))), table(["name", "version", "created"], rows, empty), h("section", { class: "card" }, h("h2", {}, t("secret.set")), set));
}

/** The workers and what they have in hand. */
export async function workersView({ view }) {
  const rows = h("tbody");
  const empty = h("p", { class: "empty", hidden: true }, t("workers.none"));

  async function read() {
    const page = await api.get("/workers?limit=200");
    empty.hidden = page.items.length > 0;
    fill(rows, page.items.map(row));
  }

  function row(one) {
    const { architecture, cpu_cores: cores, memory_bytes: memory, system } = one.capabilities;
    const machine = [system, architecture, cores ? `${cores} CPU` : null, memory ? size(memory) : null].filter(Boolean).join(" · ");
    const drained = one.status === "draining";
    return h(
      "tr",
      {},
      h("td", { class: "name" }, h("strong", {}, one.id), h("small", {}, machine)),
      h("td", { data: { label: t("status") } }, chip(one.status)),
      h("td", { data: { label: t("slots") } }, h("meter", { min: "0", max: String(one.slots), value: String(one.leased) }), ` ${one.leased} / ${one.slots}`),
      h("td", { data: { label: t("heartbeat") } }, instant(one.last_heartbeat_at_ms)),
      h(
        "td",
        { class: "acts" },
        one.status === "offline"
          ? null
          : action(t(drained ? "resume" : "drain"), async () => {
              await api.post(`/workers/${one.id}/${drained ? "resume" : "drain"}`);
              await read();
            }),
      ),
    );
  }

  await read();
  fill(view, h("div", { class: "head" }, h("h1", {}, t("workers"))), table(["worker", "status", "slots", "heartbeat", ""], rows, empty));
  const clock = setInterval(() => read().catch(() => {}), 5000);
  return { end: () => clearInterval(clock) };
}
