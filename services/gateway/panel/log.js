// A live log that stays light: bytes become text as they come, colours are kept, old lines leave the page.

import { follow, logAddress, logHead } from "./api.js";
import { fill, h } from "./dom.js";
import { size } from "./format.js";
import { t } from "./words.js";

const SHOWN_BYTES = 256 * 1024;
const LINES = 5000;
const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

/** The log of a run, followed from its last 256 KiB. Answers its element and a function that ends it. */
export function logView(project, run, attempt) {
  const screen = h("pre", { class: "log", tabindex: "0", "aria-label": t("log") });
  const state = h("span", { class: "dim" });
  const stick = h("input", { type: "checkbox", checked: true });
  const query = attempt ? `?attempt=${attempt}` : "";
  const whole = h("a", { href: logAddress(project, run) + query, download: `${run}.log` }, t("log.download"));
  const bar = h("div", { class: "logbar" }, state, h("label", {}, stick, t("log.follow")), whole);
  const paint = painter(screen, () => stick.checked);
  let end = () => {};
  let closed = false;

  screen.addEventListener("scroll", () => {
    // Scrolling up holds the text still; coming back to the end follows it again.
    stick.checked = screen.scrollHeight - screen.scrollTop - screen.clientHeight < 40;
  });

  async function start() {
    fill(state, t("log.waiting"));
    let from = 0;
    try {
      const head = await logHead(project, run, attempt);
      from = Math.max(0, head.total - SHOWN_BYTES);
    } catch (problem) {
      fill(state, problem.message);
      return;
    }
    if (closed) return;
    if (from > 0) paint.mark(t("log.tail", { size: size(SHOWN_BYTES) }));
    let position = from;
    const here = () => `/projects/${project}/runs/${run}/log/stream?offset=${position}${attempt ? `&attempt=${attempt}` : ""}`;
    end = follow(here, {
      chunk(chunk) {
        const bytes = Uint8Array.from(atob(chunk.data), (c) => c.charCodeAt(0));
        // A connection that was made anew may begin a little earlier.
        const skip = Math.max(0, position - chunk.offset);
        if (skip >= bytes.length) return;
        position = chunk.offset + bytes.length;
        paint.write(bytes.subarray(skip));
        fill(state, t("log.live", { size: size(position) }));
      },
      end(told) {
        end();
        paint.end();
        fill(state, told.offset === 0 ? t("log.empty") : t(told.truncated === null ? "log.part" : told.truncated ? "log.cut" : "log.ended", { size: size(told.offset) }));
      },
      error(problem) {
        end();
        fill(state, problem.title ?? "");
      },
    });
  }
  start();
  return {
    element: h("section", { class: "card flush" }, bar, screen),
    end() {
      closed = true;
      end();
    },
  };
}

/** Writes bytes into a screen, a frame at a time. */
function painter(screen, sticking) {
  const decoder = new TextDecoder("utf-8");
  let waiting = "";
  let scheduled = false;
  let ended = false;
  let style = { colour: null, bold: false };
  let lines = 0;

  function flush() {
    scheduled = false;
    // A sequence or a line's end that is cut at the end of a chunk waits for its rest.
    const cut = ended ? -1 : waiting.search(/(?:\x1b[^A-Za-z]{0,16}|\r)$/);
    // What a carriage return overwrites (progress bars) is left out here; the whole log has it.
    const text = (cut < 0 ? waiting : waiting.slice(0, cut)).replace(/\r+\n/g, "\n").replace(/[^\n]*\r/g, "");
    waiting = cut < 0 ? "" : waiting.slice(cut);
    if (!text) return;
    const block = document.createElement("span");
    for (const [part, classes] of segments(text)) {
      if (classes) block.append(h("span", { class: classes }, part));
      else block.append(part);
    }
    block.lines = (text.match(/\n/g) ?? []).length;
    lines += block.lines;
    screen.append(block);
    while (lines > LINES && screen.childElementCount > 1) {
      lines -= screen.firstElementChild.lines ?? 0;
      screen.firstElementChild.remove();
    }
    if (sticking()) screen.scrollTop = screen.scrollHeight;
  }

  function* segments(text) {
    // CSI sequences: colours are shown, everything else (cursor, titles) is left out.
    const pattern = /\x1b(?:\[([0-9;?]*)([A-Za-z])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g;
    let at = 0;
    for (const match of text.matchAll(pattern)) {
      if (match.index > at) yield [text.slice(at, match.index), classesOf(style)];
      if (match[2] === "m") style = styled(style, match[1]);
      at = match.index + match[0].length;
    }
    if (at < text.length) yield [text.slice(at), classesOf(style)];
  }

  function write(bytes) {
    waiting += decoder.decode(bytes, { stream: true });
    if (!scheduled) {
      scheduled = true;
      requestAnimationFrame(flush);
    }
  }

  return {
    write,
    end() {
      ended = true;
      waiting += decoder.decode();
      flush();
    },
    mark(text) {
      screen.append(h("span", { class: "dim" }, `${text}\n`));
    },
  };
}

function classesOf({ colour, bold }) {
  return [colour && `c-${colour}`, bold && "c-bold"].filter(Boolean).join(" ") || null;
}

function styled(style, codes) {
  let { colour, bold } = style;
  for (const code of (codes || "0").split(";").map(Number)) {
    if (code === 0) [colour, bold] = [null, false];
    else if (code === 1) bold = true;
    else if (code === 22) bold = false;
    else if (code === 39) colour = null;
    else if (code >= 30 && code <= 37) colour = COLOURS[code - 30];
    else if (code >= 90 && code <= 97) colour = COLOURS[code - 90];
  }
  return { colour, bold };
}
