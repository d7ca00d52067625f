// Sign-in, the two one-time links, and one's own account.

import * as api from "./api.js";
import { action, field, fill, form, h, note } from "./dom.js";
import { chip, instant } from "./format.js";
import { t } from "./words.js";

const userInput = () =>
  h("input", { name: "user", autocomplete: "username", autocapitalize: "none", spellcheck: "false", required: true, maxlength: "63" });
const passwordInput = (name = "password", kind = "current-password") =>
  h("input", { name, type: "password", autocomplete: kind, required: true, maxlength: "256" });
const codeInput = () =>
  h("input", { name: "code", inputmode: "numeric", autocomplete: "one-time-code", pattern: "[0-9]{6}", maxlength: "6" });

/** Sign-in; the second factor's field appears when it is asked for. */
export function signInView({ signedIn }) {
  const user = userInput();
  const password = passwordInput();
  const code = codeInput();
  const second = field(t("code"), code, t("code.hint"));
  second.hidden = true;
  const made = form([field(t("user"), user), field(t("password"), password), second], t("signin"), async () => {
    const body = { user: user.value.trim().toLowerCase(), password: password.value };
    if (code.value) body.code = code.value;
    try {
      await signedIn(await api.enter("/session", body));
    } catch (problem) {
      if (problem.data?.second_factor) {
        second.hidden = false;
        code.focus();
      }
      throw problem;
    }
  });
  queueMicrotask(() => user.focus());
  return h("section", { class: "card narrow" }, h("h1", {}, t("signin")), made, h("p", { class: "dim" }, t("signin.hint")));
}

/** The owner link: `#claim=<challenge>.<token>`. */
export function claimView({ signedIn }, link) {
  const [challenge, token] = link.split(".");
  const user = userInput();
  const password = passwordInput("password", "new-password");
  const made = form([field(t("user"), user), field(t("password"), password, t("password.hint"))], t("claim.submit"), async () => {
    const body = { challenge, token: token ?? "", user: user.value.trim().toLowerCase(), password: password.value };
    await signedIn(await api.enter("/bootstrap/claim", body));
  });
  queueMicrotask(() => user.focus());
  return h("section", { class: "card narrow" }, h("h1", {}, t("claim.title")), h("p", {}, t("claim.text")), made);
}

/** A password link: `#join=<id>.<token>`. */
export function joinView({ signedIn }, link) {
  const [id, token] = link.split(".");
  const password = passwordInput("password", "new-password");
  const made = form([field(t("password"), password, t("password.hint"))], t("join.submit"), async () => {
    await signedIn(await api.enter("/password-links/use", { link: id, token: token ?? "", password: password.value }));
  });
  queueMicrotask(() => password.focus());
  return h("section", { class: "card narrow" }, h("h1", {}, t("join.title")), h("p", {}, t("join.text")), made);
}

/** One's own account. */
export async function accountView({ view, me }) {
  const credentials = h("tbody");
  const once = h("div");

  async function read() {
    const page = await api.get("/credentials");
    fill(
      credentials,
      page.items.map((item) =>
        h(
          "tr",
          {},
          h("td", { data: { label: t("name") } }, item.name),
          h("td", { data: { label: t("status") } }, chip(item.state)),
          h("td", { data: { label: t("expires") } }, instant(item.expires_at_ms)),
          h(
            "td",
            { class: "acts" },
            item.state === "active"
              ? action(t("revoke"), async () => {
                  await api.post(`/credentials/${item.id}/revoke`);
                  await read();
                })
              : null,
          ),
        ),
      ),
    );
  }

  const current = passwordInput("current");
  const changed = passwordInput("new", "new-password");
  const change = form([field(t("password.current"), current), field(t("password.new"), changed, t("password.hint"))], t("password.change"), async () => {
    await api.post("/session/password", { current: current.value, new: changed.value });
    current.value = changed.value = "";
    note(t("password.changed"));
  });
  const name = h("input", { name: "name", required: true, maxlength: "255" });
  const make = form([field(t("name"), name)], t("token.new"), async () => {
    const made = await api.post("/credentials", { name: name.value });
    name.value = "";
    fill(once, h("p", {}, t("token.once")), h("code", { class: "token" }, made.token));
    await read();
  });
  await read();
  fill(
    view,
    h("div", { class: "head" }, h("h1", {}, t("account")), h("span", { class: "space" }), action(t("signout"), () => dispatchEvent(new Event("signout")))),
    h("p", {}, t("signed", { name: me.id, assurance: me.assurance })),
    h("section", { class: "card" }, h("h2", {}, t("tokens")), h("table", { class: "rows" }, credentials), make, once),
    h("section", { class: "card" }, h("h2", {}, t("factor")), factor()),
    h("section", { class: "card" }, h("h2", {}, t("password")), change),
  );
}

function factor() {
  const box = h("div");
  const done = () => fill(box, h("p", {}, t("factor.done")));
  fill(box, h("button", { type: "button", onclick: () => fill(box, enrolment(done)) }, t("factor.begin")));
  return box;
}

/** A new second factor: the password once more, its key, and the code that confirms it. */
function enrolment(done) {
  const box = h("div");
  const password = passwordInput();
  const ask = form([field(t("password"), password, t("factor.password"))], t("factor.next"), async () => {
    const { uri } = await api.post("/session/totp", { password: password.value });
    const code = codeInput();
    const confirm = form([field(t("code"), code)], t("confirm"), async () => {
      await api.post("/session/confirm", { code: code.value });
      await done();
    });
    const key = new URL(uri).searchParams.get("secret");
    fill(box, h("p", {}, t("factor.add")), h("code", { class: "token" }, key), h("p", {}, h("a", { href: uri }, t("factor.open"))), confirm);
  });
  fill(box, ask);
  return box;
}

/**
 * Does what may need a stronger or more recent sign-in. When it does, the second factor is asked for, or set up first,
 * and the work is done again.
 */
export async function strongly(work) {
  try {
    return await work();
  } catch (problem) {
    if (problem.code !== "assurance_required") throw problem;
  }
  await prove();
  return work();
}

async function prove() {
  const me = await api.get("/session");
  const dialog = h("dialog", { "aria-label": t("factor") });
  document.body.append(dialog);
  try {
    await new Promise((resolve, reject) => {
      const proven = () => dialog.close("proven");
      dialog.addEventListener("close", () => (dialog.returnValue === "proven" ? resolve() : reject(new Error(t("factor.needed")))));
      const cancel = h("button", { type: "button", onclick: () => dialog.close() }, t("cancel"));
      if (me.second_factor) {
        const code = codeInput();
        const asked = form([field(t("code"), code, t("code.hint"))], t("confirm"), async () => {
          await api.post("/session/confirm", { code: code.value });
          proven();
        });
        asked.querySelector(".row").append(cancel);
        fill(dialog, h("h2", {}, t("factor")), h("p", {}, t("factor.why")), asked);
      } else {
        fill(dialog, h("h2", {}, t("factor")), h("p", {}, t("factor.first")), enrolment(proven), cancel);
      }
      dialog.showModal();
    });
  } finally {
    dialog.remove();
  }
}
