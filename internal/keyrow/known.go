package keyrow

import "sync"

// known remembers which keys have rows, and which of them ever had a lease. It is bounded:
// when the newer half is full, the older half is forgotten. A forgotten key costs one
// plain read.
type known struct {
	mu           sync.Mutex
	newer, older map[string]bool // whether the key has had a lease
}

const knownHalf = 16384 // keys; both halves of 40-byte keys are about 3 MB

// missing returns those of keys that are not remembered.
func (k *known) missing(keys []string) (out []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		if _, ok := k.newer[key]; ok {
			continue
		}
		if leased, ok := k.older[key]; ok {
			k.put(key, leased)
			continue
		}
		out = append(out, key)
	}
	return out
}

// add remembers key; that it has had a lease is not forgotten by it.
func (k *known) add(key string, leased bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.put(key, leased || k.newer[key] || k.older[key])
}

// NoteLeased notes that key's row has a lease, or had one.
func (k *known) NoteLeased(key string) { k.add(key, true) }

// Leased reports whether key's row is known to have had a lease at some time.
func (k *known) Leased(key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.newer[key] || k.older[key]
}

// Forget is for keys whose rows have turned out to be missing.
func (k *known) Forget(keys []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		delete(k.newer, key)
		delete(k.older, key)
	}
}

func (k *known) put(key string, leased bool) {
	if _, ok := k.newer[key]; !ok && (k.newer == nil || len(k.newer) >= knownHalf) {
		k.newer, k.older = make(map[string]bool), k.newer
	}
	k.newer[key] = leased
}
