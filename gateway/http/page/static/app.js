// The page: what the user does, and what follows from it.

import { ApiError, chat, requireReady, servedModel, useKey } from "./api.js";
import { FileError, Tray } from "./files.js";
import { PcmReader } from "./pcm.js";
import { output } from "./player.js";
import { RecorderError, Recording } from "./recorder.js";
import { AnswerTurn, userTurn } from "./turns.js";

const HOLD_MS = 350; // a shorter press begins a recording that the next press ends
const CHECK_MS = 5000;
const KEY_NEEDED = 401;
const TEXT_ONLY = "(text only)";
const byId = (id) => document.getElementById(id);

const text = byId("text");
const talk = byId("talk");
const turns = byId("turns");
const tray = new Tray(byId("files"), notice);

let messages = [];
let attachments = []; // of past turns
let model = null;
let answering = null; // {abort, turn}: an answer that comes
let turn = null; // the last answer
let recording = null;
let starting = null; // a recording whose microphone is being asked for
let checking = null; // when the stack is asked next
let last = Promise.resolve(); // the end of the last answer

// --- asking ---------------------------------------------------------------

async function send(files = tray.take()) {
  const words = text.value.trim();
  if (!words && !files.length) return;
  stop();
  output();
  text.value = "";
  grow();
  notice("");
  byId("welcome").hidden = true;
  show(userTurn(words, files));
  attachments.push(...files);
  try {
    const parts = await Promise.all(files.map((each) => each.part()));
    if (words) parts.push({ type: "text", text: words });
    await ask({ role: "user", content: parts });
  } catch (error) {
    if (!(error instanceof FileError)) throw error;
    notice(error.message);
  }
}

async function ask(question) {
  await last.catch(() => {});
  last = answer(question);
  await last;
}

async function answer(question) {
  const voice = byId("voice").value;
  const spoken = voice !== TEXT_ONLY;
  const mine = { abort: new AbortController(), turn: new AnswerTurn(spoken, update) };
  answering = mine;
  turn = mine.turn;
  show(turn.element);
  update();
  try {
    await receive(mine, question, spoken, voice);
    mine.turn.end("done");
    announce(mine.turn.text);
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped && !(error instanceof ApiError)) throw error;
    if (stopped) mine.turn.end("stopped");
    else mine.turn.end("failed", error.message, mine.turn.text ? null : () => again(mine.turn, question));
    announce(stopped ? "Stopped." : "");
  } finally {
    answering = null;
    // A question without an answer is not asked again with every one that follows.
    if (mine.turn.text) messages.push(question, { role: "assistant", content: mine.turn.text });
    update();
  }
}

async function receive(mine, question, spoken, voice) {
  const asked = [...messages, question];
  const body = { model: model?.id ?? "omnirelay", messages: asked, modalities: ["text"] };
  if (spoken) {
    body.modalities.push("audio");
    body.audio = { format: "pcm16", ...(voice && { voice }) };
  }
  const { requestId, chunks } = await chat(body, mine.abort.signal);
  mine.turn.element.dataset.request = requestId;
  const reader = new PcmReader();
  for await (const { choices } of chunks) {
    const delta = choices[0]?.delta ?? {};
    const words = delta.content ?? delta.audio?.transcript;
    if (words) mine.turn.addText(words);
    if (delta.audio?.data) mine.turn.addSamples(reader.read(delta.audio.data));
    follow();
  }
}

async function again(failed, question) {
  failed.element.remove();
  await ask(question);
}

function stop() {
  answering?.abort.abort();
  turn?.hush();
}

async function reset() {
  stop();
  await last.catch(() => {});
  messages = [];
  for (const each of attachments.splice(0)) each.release();
  turns.replaceChildren();
  byId("welcome").hidden = false;
  notice("");
  text.focus();
}

// --- talking --------------------------------------------------------------

async function beginTalking() {
  if (recording || starting) return;
  stop();
  output();
  notice("");
  starting = { since: performance.now(), wanted: "go on" };
  const mine = starting;
  talk.setAttribute("aria-pressed", "true");
  try {
    recording = await Recording.begin();
  } catch (error) {
    talk.setAttribute("aria-pressed", "false");
    if (!(error instanceof RecorderError)) throw error;
    notice(error.message);
    return;
  } finally {
    starting = null;
  }
  recording.pressed = mine.since;
  byId("recording").hidden = false;
  text.hidden = true;
  recording.show(byId("level"), byId("clock"));
  announce("Recording.");
  if (mine.wanted === "discard") endTalking(false);
}

function releaseTalking() {
  const since = recording?.pressed ?? starting?.since;
  if (since !== undefined && recording && performance.now() - since >= HOLD_MS) endTalking(true);
}

async function endTalking(wanted) {
  if (starting && !wanted) starting.wanted = "discard";
  if (!recording) return;
  const ended = recording;
  recording = null;
  talk.setAttribute("aria-pressed", "false");
  byId("recording").hidden = true;
  text.hidden = false;
  if (!wanted) {
    ended.discard();
    announce("Discarded.");
    return;
  }
  tray.add([await ended.finish()]);
  await send();
}

// --- what is seen ---------------------------------------------------------

function show(element) {
  turns.append(element);
  element.scrollIntoView({ block: "end" });
}

function follow() {
  const page = document.documentElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 200) page.scrollTop = page.scrollHeight;
}

function update() {
  const busy = answering !== null || (turn?.playing ?? false);
  byId("stop").hidden = !busy;
  byId("send").hidden = busy && !text.value.trim() && tray.empty;
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
}

async function check() {
  let state = "ready";
  let words = model?.id ?? "";
  try {
    await requireReady();
    if (!model) {
      model = await servedModel();
      words = model.id;
      const options = [...model.voices, TEXT_ONLY].map((name) => new Option(name, name));
      byId("voice").replaceChildren(...options);
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    state = "away";
    words = error.message;
    if (error.status === KEY_NEEDED) {
      byId("key-field").hidden = false;
      words = "needs an API key";
    }
  }
  byId("stack").dataset.state = state;
  byId("stack-text").textContent = words;
  byId("stack").title = words;
  clearTimeout(checking);
  checking = setTimeout(check, CHECK_MS);
}

// --- what the user does ---------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
text.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) tray.add(event.clipboardData.files);
  update();
});
byId("attach").onclick = () => byId("file").click();
byId("file").onchange = (event) => {
  tray.add(event.target.files);
  event.target.value = "";
  update();
  text.focus();
};
byId("stop").onclick = () => {
  stop();
  text.focus();
};
byId("reset").onclick = reset;
byId("key").onchange = () => {
  useKey(byId("key").value);
  model = null;
  check();
};
for (const idea of document.querySelectorAll(".idea")) {
  idea.onclick = () => {
    text.value = idea.textContent;
    send();
    text.focus();
  };
}

talk.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  talk.setPointerCapture(event.pointerId);
  if (recording) endTalking(true);
  else beginTalking();
});
talk.addEventListener("pointerup", releaseTalking);
talk.addEventListener("pointercancel", () => endTalking(false));
talk.addEventListener("contextmenu", (event) => event.preventDefault());
talk.addEventListener("keydown", (event) => {
  if (event.key !== " " && event.key !== "Enter") return;
  event.preventDefault();
  if (event.repeat) return;
  if (recording) endTalking(true);
  else beginTalking();
});
talk.addEventListener("keyup", (event) => {
  if (event.key === " " || event.key === "Enter") releaseTalking();
});
talk.addEventListener("click", (event) => {
  // From assistive technology: no pointer, no key.
  if (event.detail !== 0 || event.pointerType) return;
  if (recording) endTalking(true);
  else beginTalking();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (recording || starting) endTalking(false);
    else stop();
  } else if (event.key === "F2" && !event.repeat) {
    event.preventDefault();
    if (recording) endTalking(true);
    else beginTalking();
  }
});
document.addEventListener("keyup", (event) => {
  if (event.key === "F2") releaseTalking();
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
  tray.add(event.dataTransfer.files);
  update();
  text.focus();
});

check();
if (!matchMedia("(pointer: coarse)").matches) text.focus();
