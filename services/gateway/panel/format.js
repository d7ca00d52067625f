// How times, sizes and states are written.

import { h } from "./dom.js";
import { language, t } from "./words.js";

export const ENDED = new Set(["succeeded", "failed", "cancelled", "timed_out"]);
const SHAPES = {
  succeeded: "✓",
  failed: "✕",
  cancelled: "⊘",
  timed_out: "◷",
  running: "▶",
  dispatching: "▷",
  queued: "⋯",
  created: "⋯",
  waiting_approval: "?",
  retry_wait: "↻",
  lost: "!",
  online: "●",
  draining: "◐",
  offline: "○",
  pending: "?",
  approved: "✓",
  consumed: "✓",
  rejected: "✕",
  withdrawn: "⊘",
  expired: "◷",
};

/** A state as a chip: shape, words and colour, never colour alone. */
export function chip(status) {
  return h("span", { class: `chip ${status}` }, h("span", { "aria-hidden": "true" }, SHAPES[status] ?? "·"), t(`state.${status}`));
}

/** An instant: short, with the whole date on hover. */
export function instant(ms) {
  if (ms === null || ms === undefined) return h("span", { class: "dim" }, "–");
  const date = new Date(ms);
  const locale = language();
  const today = date.toDateString() === new Date().toDateString();
  const shown = today
    ? date.toLocaleTimeString(locale, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" })
    : date.toLocaleString(locale, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString(locale, { dateStyle: "full", timeStyle: "long" }) }, shown);
}

/** A span of time in at most two units. */
export function span(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  const m = Math.floor(s / 60);
  if (m < 60) return `${m} min ${Math.round(s % 60)} s`;
  const hours = Math.floor(m / 60);
  return hours < 48 ? `${hours} h ${m % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** How long a run took, or is taking. */
export function took(run) {
  if (!run.started_at_ms) return "–";
  return span((run.finished_at_ms ?? Date.now()) - run.started_at_ms);
}

/** A size in bytes. */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

/** An id, shortened: its random end tells runs apart, its beginning is the time. */
export const short = (id) => id.slice(-8);

/** When a trigger fires, in its own words. */
export function schedule(trigger) {
  const spec = trigger.spec ?? trigger;
  if (spec.kind === undefined || spec.kind === "cron") {
    const zone = spec.timezone && spec.timezone !== "UTC" ? ` · ${spec.timezone}` : "";
    return `${spec.expression ?? ""}${zone}`;
  }
  return spec.expression ? `${spec.kind} ${spec.expression}` : spec.kind;
}
