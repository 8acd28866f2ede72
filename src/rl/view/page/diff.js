// Compares two texts word by word.

const MOST_WORDS = 3000;

/** Words, runs of blanks, and single other characters. @param {string} text */
function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

/** @typedef {{kind: "same" | "gone" | "new", text: string}} Part */

/** The parts of two texts in order: those in both, only in `before`, or only in `after`. Uses a longest common subsequence of words; for
 * texts beyond MOST_WORDS, finds only their common beginning and end. @param {string} before @param {string} after @returns {Part[]} */
export function diff(before, after) {
  const a = words(before), b = words(after);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const parts = /** @type {Part[]} */ ([]);
  add(parts, "same", a.slice(0, start));
  middle(parts, a.slice(start, a.length - end), b.slice(start, b.length - end));
  add(parts, "same", a.slice(a.length - end));
  return parts;
}

/** @param {Part[]} parts @param {Part["kind"]} kind @param {string[]} found */
function add(parts, kind, found) {
  if (!found.length) return;
  const last = parts[parts.length - 1];
  if (last?.kind === kind) last.text += found.join("");
  else parts.push({ kind, text: found.join("") });
}

/** @param {Part[]} parts @param {string[]} a @param {string[]} b */
function middle(parts, a, b) {
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) {
    add(parts, "gone", a);
    add(parts, "new", b);
    return;
  }
  const width = b.length + 1, common = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(parts, "same", [a[i]]);
      i++;
      j++;
    } else if (j >= b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      add(parts, "gone", [a[i++]]);
    } else {
      add(parts, "new", [b[j++]]);
    }
  }
}
