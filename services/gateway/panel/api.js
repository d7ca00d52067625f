// The panel's way to the API: the cookie says who asks, the CSRF token that it was this page.

import { refusal } from "./words.js";

const BASE = "/api/v3";
const AGAIN_MS = 3000;
let csrf = null;
let lost = () => {};

/** A refusal: the sentence that people read, and the code and field that pages look at. */
export class Problem extends Error {
  constructor(body) {
    super(refusal(body) ?? [body.detail ?? body.title, body.mend].filter(Boolean).join(" "));
    this.code = body.code;
    this.field = body.field;
    this.data = body.data ?? {};
  }
}

/** What to do when the session is gone. */
export function onSignedOut(work) {
  lost = work;
}

/** One request. Answers the decoded JSON. Throws `Problem`. */
export async function ask(method, path, body) {
  const headers = { Accept: "application/json" };
  if (csrf && method !== "GET") headers["Ql3-Csrf"] = csrf;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(BASE + path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch {
    throw new Problem({ code: "unavailable", title: "The server cannot be reached." });
  }
  if (answer.ok) return answer.json();
  const problem = new Problem(await answer.json().catch(() => ({ code: "internal_error", title: answer.statusText })));
  if (problem.code === "unauthenticated" && csrf) {
    csrf = null;
    lost();
  }
  throw problem;
}

export const get = (path) => ask("GET", path);
export const post = (path, body = {}) => ask("POST", path, body);
export const put = (path, body) => ask("PUT", path, body);
export const remove = (path, body = {}) => ask("DELETE", path, body);

/** The signed-in person, or null. */
export async function who() {
  try {
    const me = await get("/session");
    csrf = me.csrf;
    return me;
  } catch (problem) {
    if (problem.code === "unauthenticated") return null;
    throw problem;
  }
}

/** Signs in by one of the three ways; remembers the CSRF token. */
export async function enter(path, body) {
  const me = await post(path, body);
  csrf = me.csrf;
  return me;
}

/** Signs out. */
export async function leave() {
  await remove("/session");
  csrf = null;
}

/**
 * Follows an open answer. `heard[name](data, mark)` for each event; `heard.open` after each (re)connection, when what
 * was missed has to be read again. `path` may be a function, asked at each connection. Answers a function that ends it.
 *
 * A browser gives one server six connections for all its tabs, so a tab that nobody looks at gives its own back.
 */
export function follow(path, heard) {
  let source = null;
  let later = null;
  let ended = false;

  function connect() {
    source = new EventSource(BASE + (typeof path === "function" ? path() : path));
    for (const [name, work] of Object.entries(heard)) {
      if (name === "open") source.addEventListener("open", () => work());
      else if (name === "down") source.addEventListener("error", (event) => event.data || work());
      else source.addEventListener(name, (event) => event.data && work(JSON.parse(event.data), event.lastEventId));
    }
    source.addEventListener("error", refused);
  }

  // A browser tries again after a broken connection, but never after a refusal: a full server, or a session that ended.
  async function refused() {
    if (source?.readyState !== EventSource.CLOSED) return;
    source = null;
    const me = await get("/session").catch((problem) => (problem.code === "unauthenticated" ? null : {}));
    if (me && !ended) later = setTimeout(seen, AGAIN_MS);
  }

  function seen() {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source && !ended) connect();
  }

  seen();
  document.addEventListener("visibilitychange", seen);
  return () => {
    ended = true;
    clearTimeout(later);
    document.removeEventListener("visibilitychange", seen);
    source?.close();
  };
}

/** Where a log's bytes are. */
export const logAddress = (project, run) => `${BASE}/projects/${project}/runs/${run}/log`;

/** Size and state of a log, without its bytes. */
export async function logHead(project, run, attempt) {
  const answer = await fetch(`${logAddress(project, run)}?length=0${attempt ? `&attempt=${attempt}` : ""}`);
  if (!answer.ok) throw new Problem(await answer.json());
  return { total: Number(answer.headers.get("Ql3-Log-Total")), truncated: answer.headers.get("Ql3-Log-Truncated") };
}
