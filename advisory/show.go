package advisory

import (
	"context"

	"github.com/mysqllock/mysqllock/internal/purpose"
)

// Show acquires a named lock of the server for which no one waits. Other processes can
// see that it is held, until release. ok is false if it was not acquired, for example
// because another process holds it.
func (l *Locker) Show(ctx context.Context, name string) (release func(), ok bool) {
	if l.running.Enter() != nil {
		return nil, false
	}
	defer l.running.Done()
	if l.allowed() != nil {
		return nil, false
	}
	lock := l.show(ctx, name, name, nil)
	return func() {
		if l.running.Enter() == nil { // else Close has released it
			defer l.running.Done()
			lock.conn.do(context.Background(), &request{lock: lock})
		}
	}, lock != nil
}

// show is Show for those who look for key. It returns nil if the lock was not acquired.
func (l *Locker) show(ctx context.Context, key, name string, asked purpose.Asked) *Lock {
	k, err := l.pickConn(ctx)
	if err != nil {
		return nil
	}
	r := &request{lock: &Lock{l: l, key: key, name: name, conn: k, asked: asked}, acquire: true}
	switch {
	case !k.do(ctx, r):
		l.releaseLate(r, nil)
		return nil
	case !r.granted:
		return nil
	}
	return r.lock
}
