// Speech between base64, 16-bit samples and WAV.

export const RATE = 24000;
const HEADER = 44;

/** Reads base64 of 16-bit samples, piece by piece; a piece may end within a sample. */
export class PcmReader {
  #rest = new Uint8Array(0);

  /** @returns {Int16Array} the samples that are complete */
  read(base64) {
    const text = atob(base64);
    const bytes = new Uint8Array(this.#rest.length + text.length);
    bytes.set(this.#rest);
    for (let i = 0, at = this.#rest.length; i < text.length; i++, at++) bytes[at] = text.charCodeAt(i);
    const count = bytes.length >> 1;
    this.#rest = bytes.slice(2 * count);
    const view = new DataView(bytes.buffer);
    return Int16Array.from({ length: count }, (_, i) => view.getInt16(2 * i, true));
  }
}

/** @returns {string} samples from -1 to 1 as base64 of 16-bit samples */
export function base64(samples) {
  const view = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, i) => view.setInt16(2 * i, Math.max(-1, Math.min(1, sample)) * 32767, true));
  return btoa(String.fromCharCode(...new Uint8Array(view.buffer)));
}

/** @returns {Float32Array} the same samples from -1 to 1 */
export function floats(samples) {
  return Float32Array.from(samples, (sample) => sample / 32768);
}

/** @returns {Int16Array} the pieces in one */
export function join(pieces) {
  const whole = new Int16Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

/** @returns {Blob} a WAV file */
export function wav(samples) {
  const view = new DataView(new ArrayBuffer(HEADER + 2 * samples.length));
  const ascii = (at, text) => [...text].forEach((sign, i) => view.setUint8(at + i, sign.charCodeAt(0)));
  ascii(0, "RIFF");
  view.setUint32(4, HEADER - 8 + 2 * samples.length, true);
  ascii(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  ascii(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(HEADER + 2 * i, sample, true));
  return new Blob([view.buffer], { type: "audio/wav" });
}
