package advisory

import "context"

// Mark acquires a named lock of the server for which no one waits. Other processes can
// see that it is held, until release. ok is false if it was not acquired, for example
// because another process holds it.
func (l *Locker) Mark(ctx context.Context, name string) (release func(), ok bool) {
	if l.running.Enter() != nil {
		return nil, false
	}
	defer l.running.Done()
	a := &attempt{Locker: l}
	if a.allowed() != nil {
		return nil, false
	}
	k, err := l.pickConn(ctx)
	if err != nil {
		return nil, false
	}
	r := &request{lock: &Lock{l: l, key: name, name: name, conn: k}, acquire: true}
	if !k.do(ctx, r) {
		l.settle(r, nil)
		return nil, false
	}
	if !r.granted {
		return nil, false
	}
	return func() {
		if l.running.Enter() == nil { // else Close has released it
			defer l.running.Done()
			k.do(context.Background(), &request{lock: r.lock})
		}
	}, true
}
