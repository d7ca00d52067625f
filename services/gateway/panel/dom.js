// Elements without markup strings: whatever a task, a log or a person wrote only ever becomes text.

/** An element. `props`: `on…` are listeners, `class`, `data`, booleans and attributes; children are nodes or text. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name === "htmlFor" ? "for" : name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Puts `children` in place of whatever is in `parent`. */
export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

/** Rows by key: a list that is read again keeps its elements, and with them focus and selection. */
export function keyed(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let row = known.get(key);
    if (row) known.delete(key);
    else {
      row = make(item);
      row.dataset.key = key;
    }
    update(row, item);
    if (row === before) before = before.nextElementSibling;
    else parent.insertBefore(row, before);
  }
  for (const gone of known.values()) gone.remove();
}

/** Calls `work` once for many calls within `wait` milliseconds, and again for what came meanwhile. */
export function gathered(work, wait) {
  let timer = null;
  let running = false;
  let again = false;
  async function go() {
    timer = null;
    running = true;
    try {
      await work();
    } finally {
      running = false;
      if (again) {
        again = false;
        call();
      }
    }
  }
  function call() {
    if (running) again = true;
    else if (timer === null) timer = setTimeout(go, wait);
  }
  call.cancel = () => clearTimeout(timer);
  return call;
}

/** A short note at the edge of the page, read out by screen readers. */
export function note(text, kind = "plain") {
  const box = h("div", { class: `note ${kind}` }, text);
  document.getElementById("notes").append(box);
  setTimeout(() => box.remove(), kind === "bad" ? 8000 : 4000);
}

/** A button that cannot be pressed twice while its work is under way. */
export function action(label, work, props = {}) {
  const button = h("button", { type: "button", ...props }, label);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await work();
    } catch (error) {
      note(error.message, "bad");
    } finally {
      button.disabled = false;
    }
  });
  return button;
}

/** A labelled field. */
export function field(label, input, hint) {
  const id = `f${Math.random().toString(36).slice(2)}`;
  input.id = id;
  const told = hint ? h("small", { id: `${id}h` }, hint) : null;
  if (told) input.setAttribute("aria-describedby", told.id);
  return h("div", { class: "field" }, h("label", { htmlFor: id }, label), input, told);
}

/** A form whose problem is shown in it, at the field that it names when there is one. */
export function form(fields, submit, work) {
  const problem = h("p", { class: "problem", role: "alert" });
  const button = h("button", { type: "submit", class: "main" }, submit);
  const made = h("form", { class: "form", novalidate: true }, ...fields, problem, h("div", { class: "row" }, button));
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    fill(problem);
    button.disabled = true;
    try {
      await work(made);
    } catch (error) {
      fill(problem, error.message);
      const named = error.field && made.querySelector(`[name="${CSS.escape(error.field)}"]`);
      if (named) named.focus();
    } finally {
      button.disabled = false;
    }
  });
  return made;
}
