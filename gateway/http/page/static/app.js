// The page: what the user does, and what follows from it.

import { Conversation } from "./conversation.js";
import { FileError, Tray } from "./files.js";
import { Live } from "./live.js";
import { Menu } from "./menu.js";
import { output, sounding } from "./player.js";
import { Stack } from "./stack.js";
import { Store } from "./store.js";
import { Talking } from "./talking.js";

const NEAR_END = 200; // pixels from the end at which the page follows an answer
const byId = (id) => document.getElementById(id);
const coarse = matchMedia("(pointer: coarse)");

const text = byId("text");
const stack = new Stack(showStarters);
const tray = new Tray(byId("files"), { notice, limits: () => stack.model?.limits, changed: update });
const menu = new Menu(open);
const conversation = new Conversation(byId("turns"), {
  voice: () => stack.voice,
  model: () => stack.model,
  instructions: () => menu.instructions,
  why: () => stack.check(),
  draft,
  changed: update,
  announce,
  follow,
});
const talking = new Talking({
  begin() {
    conversation.stop();
    output();
    notice("");
  },
  send: (recording) => tray.add([recording]).then(send),
  notice,
  announce,
  focus,
});
const live = new Live({
  turns: byId("turns"),
  voice: () => stack.voice,
  instructions: () => menu.instructions,
  calls: () => stack.model?.calls ?? false,
  begin() {
    conversation.stop();
    output();
    notice("");
  },
  changed: update,
  notice,
  follow,
});

// --- what is asked --------------------------------------------------------

async function send() {
  if (talking.active) {
    await talking.send();
    return;
  }
  const words = text.value.trim();
  if (!words && tray.empty) return;
  output();
  const files = tray.attachments;
  try {
    const asked = conversation.ask(words, files);
    text.value = "";
    tray.put([]);
    grow();
    notice("");
    await asked;
  } catch (error) {
    if (!(error instanceof FileError)) throw error;
    draft(words, files);
    notice(error.message);
  }
}

/** Put a question back into the message field, before what is there. */
function draft(words, files) {
  text.value = [words, text.value].filter(Boolean).join("\n");
  tray.put([...files, ...tray.attachments]);
  grow();
  text.focus();
}

function stop() {
  if (live.active) live.end();
  conversation.stop();
  update();
}

/** Open an earlier conversation, or a new one. */
async function open(id = null) {
  if (live.active) live.end();
  talking.discard();
  tray.clear();
  text.value = "";
  await conversation.open(id);
  live.clear();
  notice("");
  follow(true);
  grow();
  focus();
}

// --- what is seen ---------------------------------------------------------

let atEnd = true;

function follow(always = false) {
  if (!byId("turns").children.length) return;
  if (always || atEnd) document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

/** Not on a phone: its keyboard would cover half of the page. */
function focus() {
  if (!coarse.matches) text.focus();
}

function update() {
  const busy = conversation.answering || sounding() || live.active;
  byId("stop").hidden = !busy;
  byId("send").hidden = busy && !text.value.trim() && tray.empty && !talking.active;
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
  update();
}

function notice(words) {
  byId("notice").textContent = words;
  byId("notice").hidden = !words;
}

function announce(words) {
  byId("said").textContent = words;
  update();
}

function showStarters(model) {
  if (model.starters?.length) {
    byId("ideas").replaceChildren(
      ...model.starters.map((words) => {
        const starter = document.createElement("button");
        starter.type = "button";
        starter.className = "idea";
        starter.textContent = words;
        return starter;
      }),
    );
  }
  byId("random").hidden = !model.random_weights;
}

// --- what the user does ---------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
text.addEventListener("input", () => {
  notice("");
  grow();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("paste", (event) => {
  const { files } = event.clipboardData;
  if (!files.length) return;
  event.preventDefault();
  tray.add(files).then(focus);
});
byId("attach").onclick = () => byId("file").click();
byId("file").onchange = async (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  await tray.add(files);
  focus();
};
byId("stop").onclick = () => {
  stop();
  focus();
};
byId("reset").onclick = () => open();
byId("ideas").onclick = ({ target }) => {
  if (!target.classList.contains("idea")) return;
  text.value = target.textContent;
  send();
  focus();
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("menu").open) {
    if (talking.active) talking.discard();
    else stop();
  } else if (event.key === "F2" && !event.repeat && !live.active) {
    event.preventDefault();
    talking.press();
  } else if (event.key === "Enter" && talking.active && !event.target.closest("button, select, input")) {
    // The message field is hidden while it is being recorded.
    event.preventDefault();
    send();
  }
});
document.addEventListener("keyup", (event) => {
  if (event.key === "F2") talking.release();
});

let inside = 0;
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragenter", (event) => {
  if (hasFiles(event)) byId("drop").hidden = ++inside === 0;
});
addEventListener("dragleave", (event) => {
  if (hasFiles(event)) byId("drop").hidden = --inside <= 0;
});
addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  inside = 0;
  byId("drop").hidden = true;
  tray.add([...event.dataTransfer.files]).then(focus);
});
addEventListener("scroll", () => {
  const page = document.documentElement;
  atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END;
});
// Attached files and notices make it taller: they must not cover the last answer.
new ResizeObserver(() => follow()).observe(byId("composer"));

async function begin() {
  await stack.check();
  const store = await Store.open();
  menu.list(store);
  await conversation.restore(store);
  follow(true);
}

begin();
focus();
