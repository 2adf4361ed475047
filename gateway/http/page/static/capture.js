// Hands what the microphone hears to the page; the browser runs it beside the page.

class Capture extends AudioWorkletProcessor {
  process([[samples]]) {
    if (samples) this.port.postMessage(samples.slice());
    return true;
  }
}

registerProcessor("capture", Capture);
