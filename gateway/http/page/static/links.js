// A realtime session with the gateway, by WebRTC or else by a WebSocket.

import { ApiError, beginCall } from "./api.js";
import { base64, PcmReader, RATE } from "./pcm.js";
import { SessionSocket } from "./session.js";

const CONNECT_MS = 8000;
const PIECE = RATE / 10; // samples that are sent at once

/**
 * Open a session in which a microphone is heard.
 * @param {MediaStream} microphone
 * @param {object} session its settings
 * @param {boolean} calls whether the gateway takes calls
 * @param {(event: object) => void} onEvent called with the gateway's events; `{type: "closed"}` is the last, others that are
 *     not the gateway's come from `SessionSocket`
 * @param {() => object[]} history the items of the conversation so far
 * @returns {Promise<CallLink | SocketLink>}
 */
export async function openLink(microphone, session, calls, onEvent, history) {
  if (!calls) return SocketLink.open(microphone, session, onEvent, history);
  try {
    return await CallLink.open(microphone, session, onEvent);
  } catch (error) {
    if (error instanceof ApiError) throw error;
    // Networks without a way for UDP.
    console.info(`no call by WebRTC: ${error.message}`);
    return SocketLink.open(microphone, session, onEvent, history);
  }
}

/** The gateway plays: it knows what was heard when the user interrupts. */
class CallLink {
  kind = "webrtc";
  #peer = new RTCPeerConnection();
  #speaker = new Audio();
  #channel = null;

  static async open(microphone, session, onEvent) {
    const link = new CallLink();
    try {
      await link.#connect(microphone, session, onEvent);
      return link;
    } catch (error) {
      link.close();
      throw error;
    }
  }

  async #connect(microphone, session, onEvent) {
    for (const track of microphone.getAudioTracks()) this.#peer.addTrack(track, microphone);
    const channel = (this.#channel = this.#peer.createDataChannel("oai-events"));
    this.#peer.ontrack = ({ streams, track }) => {
      this.#speaker.srcObject = streams[0] ?? new MediaStream([track]);
      this.#speaker.play();
    };
    const opened = new Promise((resolve, reject) => {
      channel.onopen = resolve;
      setTimeout(() => reject(new Error("the connection was not made in time")), CONNECT_MS);
    });
    channel.onmessage = ({ data }) => onEvent(JSON.parse(data));
    await this.#peer.setLocalDescription();
    const answer = await beginCall(this.#peer.localDescription.sdp, session);
    await this.#peer.setRemoteDescription({ type: "answer", sdp: answer });
    await opened;
    channel.onclose = () => onEvent({ type: "closed" });
    // Where the network or the gateway is lost, nothing closes the channel.
    this.#peer.onconnectionstatechange = () => this.#peer.connectionState === "failed" && channel.onclose();
  }

  send(event) {
    if (this.#channel.readyState === "open") this.#channel.send(JSON.stringify(event));
  }

  /** How much sound has been heard, for those who look at the page's elements. */
  async energy() {
    const stats = [...(await this.#peer.getStats()).values()];
    return stats.find(({ type, kind }) => type === "inbound-rtp" && kind === "audio")?.totalAudioEnergy ?? 0;
  }

  close() {
    this.#speaker.srcObject = null;
    this.#peer.close();
  }
}

/** The page plays, and says what was heard. */
class SocketLink {
  kind = "websocket";
  #socket;
  #context = new AudioContext({ sampleRate: RATE });

  static async open(microphone, session, onEvent, history) {
    const link = new SocketLink();
    try {
      await link.#connect(session, onEvent, history);
      await link.#listen(microphone);
      return link;
    } catch (error) {
      link.close();
      throw error;
    }
  }

  /** Tell the gateway how much of an answer was heard. */
  truncate(item, ms) {
    this.send({ type: "conversation.item.truncate", item_id: item, content_index: 0, audio_end_ms: ms });
  }

  close() {
    this.#context.close();
    this.#socket?.close();
  }

  async #connect(session, onEvent, history) {
    let reader = new PcmReader();
    const take = (event) => {
      if (event.type === "renewed") reader = new PcmReader();
      if (event.type === "response.output_audio.delta") event.samples = reader.read(event.delta);
      onEvent(event);
    };
    this.#socket = new SessionSocket(session, take, history);
    await this.#socket.open();
  }

  async #listen(microphone) {
    await this.#context.audioWorklet.addModule("/page/capture.js");
    const capture = new AudioWorkletNode(this.#context, "capture", { numberOfOutputs: 0, channelCount: 1 });
    let pieces = [];
    capture.port.onmessage = ({ data }) => {
      pieces.push(...data);
      if (pieces.length < PIECE) return;
      this.send({ type: "input_audio_buffer.append", audio: base64(pieces) });
      pieces = [];
    };
    this.#context.createMediaStreamSource(microphone).connect(capture);
  }

  send(event) {
    this.#socket.send(event);
  }
}
