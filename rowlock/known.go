package rowlock

import "sync"

// known remembers keys whose rows exist, within a bound: when the newer half is
// full, the older half is forgotten. A forgotten key costs one plain read.
type known struct {
	mu           sync.Mutex
	newer, older map[string]struct{}
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
		if _, ok := k.older[key]; ok {
			k.put(key)
			continue
		}
		out = append(out, key)
	}
	return out
}

func (k *known) add(keys []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		k.put(key)
	}
}

func (k *known) forget(keys []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		delete(k.newer, key)
		delete(k.older, key)
	}
}

func (k *known) put(key string) {
	if k.newer == nil || len(k.newer) >= knownHalf {
		k.newer, k.older = make(map[string]struct{}), k.newer
	}
	k.newer[key] = struct{}{}
}
