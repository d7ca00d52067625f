// The frame: who is signed in, which page is shown, and one way out of each page.

import * as api from "./api.js";
import { fill, h, note } from "./dom.js";
import { language, switchLanguage, t } from "./words.js";
import { signInView, claimView, joinView, accountView } from "./view-session.js";
import { runsView } from "./view-runs.js";
import { runView } from "./view-run.js";
import { tasksView } from "./view-tasks.js";
import { approvalsView, secretsView, workersView } from "./view-others.js";

const THEME = "ql3-theme";
const PROJECT = "ql3-project";
const PAGES = { runs: runsView, run: runView, tasks: tasksView, approvals: approvalsView, secrets: secretsView, workers: workersView, account: accountView };

const top_ = document.getElementById("top");
const view = document.getElementById("view");
let me = null;
let projects = [];
let end = () => {};

/** What every page gets: where it draws, the project, and the rest of the address. */
function context() {
  return { view, me, project: localStorage.getItem(PROJECT) ?? "default", rest: location.hash.split("/").slice(2), signedIn };
}

function header(page) {
  const links = ["runs", "tasks", "approvals", "secrets", "workers"].map((name) =>
    h("a", { href: `#/${name}`, "aria-current": page === name || (name === "runs" && page === "run") ? "page" : null }, t(name)),
  );
  const chooser =
    projects.length > 1
      ? h(
          "select",
          {
            "aria-label": t("project"),
            onchange: (event) => {
              localStorage.setItem(PROJECT, event.target.value);
              location.hash = "#/runs";
              show();
            },
          },
          projects.map((project) => h("option", { value: project.id, selected: project.id === context().project }, project.id)),
        )
      : null;
  fill(
    top_,
    h("a", { class: "brand", href: "#/runs" }, h("img", { src: "/assets/icon.svg", alt: "", width: "26", height: "26" }), "ql3"),
    me ? h("nav", { "aria-label": "ql3" }, links) : h("span", { class: "space" }),
    chooser,
    h("button", { type: "button", class: "quiet", title: t("theme"), "aria-label": t("theme"), onclick: switchTheme }, "◐"),
    h("button", { type: "button", class: "quiet", lang: language() === "en" ? "zh-CN" : "en", onclick: otherLanguage }, t("language")),
    me ? h("a", { class: "me", href: "#/account", "aria-current": page === "account" ? "page" : null }, me.id) : null,
  );
}

/** How many requests wait for a word, at the link that leads to them. */
async function count() {
  const link = top_.querySelector('a[href="#/approvals"]');
  const page = await api.get(`/projects/${context().project}/approvals?state=pending&limit=100`).catch(() => null);
  if (link?.isConnected && page?.items.length) {
    const number = page.next ? "99+" : String(page.items.length);
    link.append(h("span", { class: "badge", "aria-label": t("approval.count", { number }) }, number));
  }
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const shown = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = shown === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, document.documentElement.dataset.theme);
}

function otherLanguage() {
  switchLanguage();
  show();
}

async function show() {
  end();
  end = () => {};
  const [word, token] = location.hash.replace(/^#/, "").split("=");
  if (word === "claim" || word === "join") {
    me = null;
    header("");
    fill(view, (word === "claim" ? claimView : joinView)(context(), token ?? ""));
    return;
  }
  if (!me) {
    header("");
    fill(view, signInView(context()));
    return;
  }
  const page = location.hash.split("/")[1] || "runs";
  header(page);
  count();
  document.title = `${t(page in PAGES && page !== "run" ? page : "runs")} · ql3`;
  fill(view, h("p", { class: "dim" }, t("loading")));
  try {
    const shown = await (PAGES[page] ?? runsView)(context());
    end = shown?.end ?? end;
  } catch (problem) {
    fill(view, h("p", { class: "problem", role: "alert" }, problem.message));
  }
}

async function signedIn(person) {
  me = person;
  projects = await api.get("/projects").then((page) => page.items, () => []);
  const known = projects.some((project) => project.id === context().project);
  if (!known && projects.length) localStorage.setItem(PROJECT, projects[0].id);
  // The link's token must not stay in the address bar or the history.
  if (/^#(claim|join)=/.test(location.hash)) history.replaceState(null, "", "#/runs");
  await show();
}

api.onSignedOut(() => {
  me = null;
  show();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  // The address names the page; jumping over the navigation must not change it.
  event.preventDefault();
  view.focus();
});
addEventListener("hashchange", () => {
  show();
  view.focus({ preventScroll: true });
});
addEventListener("signout", async () => {
  await api.leave().catch((problem) => note(problem.message, "bad"));
  me = null;
  location.hash = "";
  show();
});

const theme = localStorage.getItem(THEME);
if (theme) document.documentElement.dataset.theme = theme;
if (/^#(claim|join)=/.test(location.hash)) show();
else
  api.who().then(
    (person) => (person ? signedIn(person) : show()),
    (problem) => fill(view, h("p", { class: "problem", role: "alert" }, problem.message)),
  );
